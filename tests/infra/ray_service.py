"""The part of KubeRay's RayService that infra/kuberay uses, as a strict JSON schema.

Written by hand from KubeRay's API types (v1.5), since no package carries the definition: a key that
is not here is refused, also one that KubeRay would take, so a new one is looked up before it is
used. Pod templates are Kubernetes' own and are held against its schema (test_kubernetes.py).
"""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
# Everything that goes to `ray start` is a string, numbers too.
_START = {"type": "object", "additionalProperties": {"type": "string"}}
_TEMPLATE = _object(("spec",), metadata=_object(labels=_LABELS), spec={"type": "object"})

RAY_SERVICE = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object(("name",), name=_TEXT, namespace=_TEXT, labels=_LABELS),
    spec=_object(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=_TEXT,
        excludeHeadPodFromServeSvc={"type": "boolean"},
        upgradeStrategy=_object(("type",), type={"enum": ["NewCluster", "None"]}),
        rayClusterConfig=_object(
            ("headGroupSpec", "rayVersion"),
            rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            authOptions=_object(("mode",), mode={"enum": ["token", "disabled"]}),
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=_object(
                ("rayStartParams", "template"), rayStartParams=_START, template=_TEMPLATE
            ),
            workerGroupSpecs={
                "type": "array",
                "items": _object(
                    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
                    groupName=_TEXT,
                    replicas=_COUNT,
                    minReplicas=_COUNT,
                    maxReplicas=_COUNT,
                    rayStartParams=_START,
                    template=_TEMPLATE,
                ),
            },
        ),
    ),
)

# The Prometheus operator's, likewise.
POD_MONITOR = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata=_object(("name",), name=_TEXT, namespace=_TEXT, labels=_LABELS),
    spec=_object(
        ("selector", "podMetricsEndpoints"),
        selector=_object(matchLabels=_LABELS),
        podMetricsEndpoints={
            "type": "array",
            "items": _object(
                ("port",),
                port=_TEXT,
                interval={"type": "string", "pattern": r"^\d+s$"},
                relabelings={
                    "type": "array",
                    "items": _object(
                        sourceLabels={"type": "array", "items": _TEXT}, targetLabel=_TEXT
                    ),
                },
            ),
        },
    ),
)
