"""Write serve-config.yaml of each overlay from its cluster.yaml: what KubeRay hands to Ray Serve.

    python infra/kuberay/serve_config.py [--check] [DIRECTORY...]      default: all overlays

--check writes nothing, and exits 1 naming the files that are not what they would be.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dspark.deploy.cluster_config import ClusterConfig, read_cluster
from dspark.deploy.ray.serve_config import serve_config

OVERLAYS = Path(__file__).parent / "overlays"
HEAD = "# Made by infra/kuberay/serve_config.py of cluster.yaml: change that.\n"


class _Block(str):
    """A text that YAML shows line by line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def patch(cluster: Path) -> str:
    """The patch for the overlay of one cluster.yaml. Raises ConfigError."""
    config = serve_config(read_cluster(cluster))
    defaults = ClusterConfig().model_dump(mode="json")
    for application in config["applications"]:
        application["args"] = {"config": said(application["args"]["config"], defaults)}
    told = yaml.safe_dump(config, sort_keys=False)
    resource = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "dspark"},
        "spec": {"serveConfigV2": _Block(told)},
    }
    return HEAD + yaml.dump(resource, Dumper=_Dumper, sort_keys=False)


def said(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What is not as it would be anyway: what a reader wants to see, and no diff in the next
    version for each new default."""
    found = {}
    for name, value in config.items():
        usual = defaults.get(name)
        if isinstance(value, dict) and isinstance(usual, dict):
            value = said(value, usual)
            if value:
                found[name] = value
        elif value != usual:
            found[name] = value
    return found


def main(arguments: Sequence[str]) -> int:
    check = "--check" in arguments
    named = [Path(a) for a in arguments if a != "--check"]
    stale = []
    for overlay in named or sorted(p for p in OVERLAYS.iterdir() if p.is_dir()):
        wanted, file = patch(overlay / "cluster.yaml"), overlay / "serve-config.yaml"
        if file.is_file() and file.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(str(file))
        if not check:
            file.write_text(wanted, encoding="utf-8")
    if stale:
        print("\n".join(f"{'stale' if check else 'wrote'}: {file}" for file in stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
