"""docker-compose.yml and its overlay, as the real binary reads them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.deploy.cluster_config import POOLS, read_cluster
from dspark.deploy.ray.serve_config import serve_config

from .tools import INFRA, ROOT, compose_binary, run

PLAIN = ("docker-compose.yml",)
CUDA = ("docker-compose.yml", "infra/docker-compose.cuda.yml")
TLS = ("docker-compose.yml", "infra/docker-compose.tls.yml")
RAY = ("ray-head", *POOLS)
OURS = (*RAY, "deploy")
# What ends by itself.
ONE_SHOT = {"deploy"}
# Images of one static binary: nothing in them could run a check.
UNCHECKED = {"collector", "jaeger"}


@cache
def rendered(files: tuple[str, ...]) -> dict[str, Any]:
    """With every profile, and no .env but an empty one."""
    named = [word for file in files for word in ("-f", file)]
    status, out, error = run(
        compose_binary(),
        "--env-file=/dev/null",
        "--profile=*",
        *named,
        "config",
        "--format=json",
        environment={"DSPARK_SECRETS": "/secrets"},
    )
    assert status == 0, error
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(params=[PLAIN, CUDA, TLS], ids=["cpu", "cuda", "tls"])
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = rendered(request.param)["services"]
    return found


def test_the_binary_takes_the_files_and_says_nothing_on_stderr() -> None:
    for files in (PLAIN, CUDA, TLS):
        named = [word for file in files for word in ("-f", file)]
        told = run(compose_binary(), "--env-file=/dev/null", *named, "config", "--quiet")
        assert told == (0, "", "")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            "    restart: unless-stopped\n    healthcheck:\n",
            "    restarts: always\n    healthcheck:\n",
        ),
        ("condition: service_healthy", "condition: service_well"),
        ("networks: [cluster, store]", "networks: [cluster, stores]"),
    ],
    ids=["unknown key", "unknown condition", "unknown network"],
)
def test_the_binary_is_strict(tmp_path: Path, line: str, wrong: str) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert line in text
    file = tmp_path / "docker-compose.yml"
    file.write_text(text.replace(line, wrong, 1))
    status, _, error = run(compose_binary(), "-f", str(file), "config", "--quiet")
    assert status != 0
    assert error


def test_every_container_is_locked_and_bounded(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service["deploy"]["resources"]["limits"]) >= {"cpus", "memory", "pids"}, name
        assert service["logging"]["options"]["max-size"], name
        assert "privileged" not in service, name


def test_every_container_comes_back_and_is_looked_at(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["restart"] == ("on-failure:5" if name in ONE_SHOT else "unless-stopped"), (
            name
        )
        checked = not service.get("healthcheck", {}).get("disable", False)
        assert checked == (name not in ONE_SHOT | UNCHECKED), name


def test_images_are_pinned(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name


def test_nothing_of_ours_runs_as_root(services: dict[str, Any]) -> None:
    for name in (*OURS, "redis", "grafana"):
        assert not services[name]["user"].startswith("0"), name


def test_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    published = {name for name, service in services.items() if service.get("ports")}
    assert published == {"gateway", "grafana", "jaeger", "prometheus"}
    for name in published:
        assert {port["host_ip"] for port in services[name]["ports"]} == {"127.0.0.1"}


def test_ray_wants_its_token_everywhere_and_reads_it_from_the_secret(
    services: dict[str, Any],
) -> None:
    for name in OURS:
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"
        assert services[name]["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_auth_token"
        assert "ray_auth_token" in {given["source"] for given in services[name]["secrets"]}


def test_secrets_are_files_and_go_to_who_needs_them(services: dict[str, Any]) -> None:
    given = {
        name: {secret["source"] for secret in service.get("secrets", [])}
        for name, service in services.items()
    }
    holders = {
        secret: {name for name, held in given.items() if secret in held}
        for secret in set().union(*given.values())
    }
    assert holders == {
        "ray_auth_token": set(OURS),
        "redis_password": {"redis", "scheduler"},
        "api_keys": {"gateway", "scheduler"},
        "grafana_password": {"grafana"},
    }


def test_no_secret_is_in_an_environment_or_an_argument(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for variable, value in (service.get("environment") or {}).items():
            secret = re.search("PASSWORD|TOKEN|SECRET|KEY", variable)
            assert not secret or value.startswith("/run/secrets/"), (name, variable)
        words = " ".join(service.get("command") or [])
        assert "--requirepass" not in words, name


def test_the_store_is_reached_by_schedulers_alone() -> None:
    found = rendered(PLAIN)
    assert found["networks"]["store"]["internal"] is True
    members = {name for name, s in found["services"].items() if "store" in s["networks"]}
    assert members == {"redis", "scheduler"}


def test_each_pool_has_nodes_that_offer_its_resource(services: dict[str, Any]) -> None:
    for pool in POOLS:
        offered = next(w for w in services[pool]["command"] if w.startswith("--resources="))
        assert json.loads(offered.partition("=")[2]) == {pool: 1}
        assert "--address=ray-head:6379" in services[pool]["command"]
        assert "container_name" not in services[pool]  # it could not be scaled


def test_deploy_waits_for_what_it_needs_and_nothing_waits_for_itself() -> None:
    services = rendered(PLAIN)["services"]
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    assert {n: w["condition"] for n, w in waits["deploy"].items()} == {
        **dict.fromkeys(
            ("redis", "ray-head", "scheduler", "verifier", "drafter"), "service_healthy"
        ),
        # Its health is that it serves, which it does once it is deployed.
        "gateway": "service_started",
    }
    assert all(set(waits[pool]) == {"ray-head"} for pool in POOLS)


def test_a_node_that_is_told_to_stop_drains_its_replica_at_once(services: dict[str, Any]) -> None:
    """Serve ends a replica on a node that drains when no more is left of the node's time than the
    replica may take; on a node that has more, it waits for a replacement that cannot come."""
    config = read_cluster(INFRA / "compose/cluster.yaml")
    for application in serve_config(config)["applications"]:
        service = services[application["name"]]
        node_s = float(service["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        (deployment,) = application["deployments"]
        assert config.drain_s < node_s <= deployment["graceful_shutdown_timeout_s"]
        assert service["stop_grace_period"] == "1m0s"
        assert node_s < 60
    # What runs there never leaves: waiting for it would be in vain.
    assert services["ray-head"]["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


def test_what_observes_is_asked_for() -> None:
    services = rendered(PLAIN)["services"]
    asked_for = {name for name, service in services.items() if service.get("profiles")}
    assert asked_for == {"collector", "jaeger", "prometheus", "grafana"}
    assert all(services[name]["profiles"] == ["observability"] for name in asked_for)


def test_cuda_gives_a_gpu_to_verifiers_and_the_right_image_to_all() -> None:
    services = rendered(CUDA)["services"]
    for name in OURS:
        assert services[name]["build"]["args"]["DEVICE"] == "cuda"
    reserved = {n for n, s in services.items() if s["deploy"]["resources"].get("reservations")}
    assert reserved == {"verifier"}
    assert "--num-gpus=1" in services["verifier"]["command"]
    assert read_cluster(INFRA / "compose/cluster-cuda.yaml").verifier.resources.gpus == 1
    # Else what the two files give is the same.
    plain = rendered(PLAIN)["services"]["verifier"]["command"]
    assert [w for w in services["verifier"]["command"] if w != "--num-gpus=1"] == plain


def test_tls_files_go_to_who_speaks_and_nothing_else_changes() -> None:
    plain, secured = rendered(PLAIN)["services"], rendered(TLS)["services"]
    for name, service in secured.items():
        mounted = [v for v in service.get("volumes", []) if v["target"] == "/run/tls"]
        assert bool(mounted) == (name in RAY)
        assert all(volume["read_only"] for volume in mounted)
        others = [v for v in service.get("volumes", []) if v not in mounted]
        assert others == plain[name].get("volumes", [])
        assert service["command"] == plain[name]["command"]


def test_variables_are_in_the_example_with_their_defaults() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    example = dict(
        re.findall(r"^#?(\w+)=(.*)$", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    )
    assert example.pop("COMPOSE_PROFILES") == "observability"  # compose's own, with our name
    assert example == used


def test_every_file_that_is_mounted_is_there() -> None:
    for service in rendered(PLAIN)["services"].values():
        for volume in service.get("volumes", []):
            assert volume["type"] != "bind" or Path(volume["source"]).exists(), volume


def test_secrets_and_env_are_not_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/infra/compose/secrets/"} <= set(ignored)


def test_yaml_anchors_say_nothing_twice() -> None:
    """A key given twice in one mapping is silently the last one for PyYAML."""
    for file in (*INFRA.rglob("*.yaml"), *INFRA.rglob("*.yml"), ROOT / "docker-compose.yml"):
        for document in yaml.compose_all(file.read_text()):
            _without_twins(document, file)


def _without_twins(node: yaml.Node | None, file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), (file, keys)
        for _, value in node.value:
            _without_twins(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _without_twins(value, file)
