"""cluster.yaml: one strict file. Whatever is wrong in it is told with the file, the field, the
value and the limit, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.core.errors import ConfigError
from dspark.deploy.cluster_config import ClusterConfig, read_cluster
from dspark.deploy.pools import POOLS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def of(file: Path, text: str) -> ClusterConfig:
    file.write_text(text)
    return read_cluster(file)


# --- what a file says ----------------------------------------------------------------------------


def test_an_empty_section_is_one_replica_of_each_pool_on_loopback(file: Path) -> None:
    config = of(file, "{}")
    assert {name: config.pool(name).initial for name in POOLS} == dict.fromkeys(POOLS, 1)
    assert {config.pool(name).host for name in POOLS} == {"127.0.0.1"}
    assert config.scheduler_addresses() == ("127.0.0.1:50060",)
    assert config.store_config({}).url == "", "an embedded Valkey"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_configuration(example: Path) -> None:
    read_cluster(example)


def test_it_travels_as_yaml_and_json(file: Path) -> None:
    config = of(
        file,
        """
        name: trip
        drafter: {autoscale: {min: 1, max: 3, target: 1}}
        verifier: {replicas: per-node, resources: {gpus: 0.5, custom: {verifier: 1}}}
        scheduler: {replicas: 2, shares: {acme: 2}, settings: {ttl_s: 3}}
        gateway: {bounds: {idle_s: 5}, tls: {certificate: a.pem, key: b.pem}}
        telemetry: {sample: 0.5}
        """,
    )
    assert ClusterConfig.of_json(config.to_json()) == config
    assert ClusterConfig.of(config.model_dump()) == config
    assert of(file, config.to_yaml()) == config


def test_every_process_gets_what_the_file_says(file: Path) -> None:
    config = of(
        file,
        """
        name: acme
        model: some/model
        served_name: chat
        drain_s: 7
        scheduler:
          replicas: 2
          port: 40000
          shares: {acme: 3}
          settings: {plan_interval_s: 0.1, tenant_tokens: 9}
        gateway: {bounds: {body_s: 3}}
        verifier: {threads: 3, fallback: none, engine: {gamma: 2, stall_timeout_s: 4}}
        drafter: {batching: {max_batch: 5}}
        """,
    )
    target, told, bounds = config.target(), config.scheduler_config(), config.http_bounds()
    assert (target.model, target.threads, target.drafter) == ("some/model", 3, "none")
    assert (target.engine.gamma, told.gamma, config.model_name) == (2, 2, "chat")
    assert (told.plan_interval_s, told.tenant_tokens, dict(told.shares)) == (0.1, 9, {"acme": 3})
    assert (bounds.body_s, bounds.stall_timeout_s, bounds.drain_s) == (3, 4, 7)
    assert config.batching().max_batch == 5
    assert config.scheduler_addresses() == ("127.0.0.1:40000", "127.0.0.1:40001")
    assert config.store_config({}).cluster == "acme"


def test_shares_of_the_key_file_hold_where_the_cluster_says_nothing(file: Path) -> None:
    config = of(file, "scheduler: {shares: {acme: 3}}")
    told = config.scheduler_config({"acme": 1.0, "other": 2.0})
    assert dict(told.shares) == {"acme": 3, "other": 2}


def test_relative_paths_begin_at_the_files_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = of(
        file,
        """
        model: ./tiny
        tls: {ca: ca.pem, certificate: c.pem, key: /k.pem}
        gateway: {keys: keys.yaml}
        store: {password_file: secret, url: "redis://h"}
        telemetry: {otlp: {endpoint: "https://h:4317", ca: otlp.pem}}
        """,
    )
    assert config.telemetry.otlp is not None
    assert config.telemetry.otlp.ca == str(tmp_path / "otlp.pem")
    assert config.model == str(tmp_path / "tiny")
    assert config.tls is not None
    assert (config.tls.ca, config.tls.key) == (str(tmp_path / "ca.pem"), "/k.pem")
    assert config.gateway.keys == str(tmp_path / "keys.yaml")
    assert config.store.password_file == str(tmp_path / "secret")
    assert of(file, "model: smollm2-135m").model == "smollm2-135m", "a name stays a name"


# --- what cannot be -------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"replicas": 3}, "replicas: is not a known field"),
    "unknown field within": (
        {"drafter": {"batching": {"max_bach": 3}}},
        "drafter.batching.max_bach: is not a known field",
    ),
    "a word for a number": ({"drain_s": "soon"}, "drain_s: Input should be a valid number"),
    "no time at all": ({"drain_s": 0}, "drain_s: Input should be greater than 0, not 0"),
    "a name that no key may have": ({"name": "a{b}"}, "name: 'a{b}' must be 1 to 64 letters"),
    "two sizes": (
        {"verifier": {"replicas": 2, "autoscale": {"max": 3}}},
        "verifier: replicas and autoscale: exactly one of them says how many",
    ),
    "no verifier": ({"verifier": {"replicas": 0}}, "verifier: replicas: 0 must be at least 1"),
    "upside down": (
        {"drafter": {"autoscale": {"min": 4, "max": 3}}},
        "drafter.autoscale: min: 4 is above max, 3",
    ),
    "a pool of none": (
        {"drafter": {"autoscale": {"min": 0, "max": 3}}},
        "drafter.autoscale.min: Input should be greater than or equal to 1, not 0",
    ),
    "negative resources": (
        {"verifier": {"resources": {"gpus": -1}}},
        "verifier.resources.gpus: Input should be greater than or equal to 0, not -1",
    ),
    "nodes without a mark": (
        {"drafter": {"replicas": "per-node"}},
        "drafter: replicas: per-node needs resources.custom",
    ),
    "an autoscaled scheduler": (
        {"scheduler": {"autoscale": {"max": 2}}},
        "scheduler: autoscale: the scheduler takes a fixed number of replicas",
    ),
    "a port of Ray's workers": (
        {"scheduler": {"port": 12_345}},
        "scheduler.port: 12345 must be outside 10000 to 19999, which Ray's workers take",
    ),
    "a range that reaches them": (
        {"gateway": {"http_port": 9998, "replicas": 4}},
        "gateway.http_port: 9998 to 10001 must be outside 10000 to 19999",
    ),
    "a range beyond the last port": (
        {"gateway": {"grpc_port": 65_535, "autoscale": {"max": 2}}},
        "gateway.grpc_port: 65535 and one for each of 2 replicas end at 65536, above 65535",
    ),
    "one port for two": (
        {"verifier": {"port": 8001}, "gateway": {"replicas": 2}},
        "verifier.port: 8001 and gateway.http_port: 8000 to 8001 overlap",
    ),
    "no such port": (
        {"verifier": {"port": 65_536}},
        "verifier.port: Input should be less than or equal to 65535, not 65536",
    ),
    "an engine that cannot be": (
        {"verifier": {"engine": {"max_sequences": 600}}},
        "verifier.engine.max_step_tokens: 512 is below max_sequences = 600",
    ),
    "a scheduler that cannot be": (
        {"scheduler": {"settings": {"ttl_s": 0.1}}},
        "scheduler.settings.ttl_s: 0.1 must be at least three times heartbeat_s, 0.5",
    ),
    "a batch of none": (
        {"drafter": {"batching": {"max_batch": 0}}},
        "drafter.batching.max_batch: 0 must be at least 1",
    ),
    "no bound": ({"gateway": {"bounds": {"body_s": 0}}}, "gateway.bounds.body_s: 0"),
    "no such drafter": (
        {"drafter": {"checkpoint": "magic"}},
        "drafter.checkpoint: 'magic' is not auto, ngram, a directory or a hub id",
    ),
    "no such device": ({"device": "tpu"}, "device: 'tpu' is not one of: cpu, cuda, cuda:N"),
    "no such policy": (
        {"verifier": {"engine": {"verify": "all"}}},
        "verifier.engine.verify: 'all' must",
    ),
    "a store in two places": (
        {"store": {"url": "redis://h", "url_file": "f"}},
        "store.url_file: store.url says where the store is already",
    ),
    "half a certificate": ({"tls": {"ca": "a", "key": "b"}}, "tls.certificate: Field required"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_cannot_be_is_refused_by_file_and_field(
    tmp_path: Path, what: str, suffix: str
) -> None:
    data, told = WRONG[what]
    file = tmp_path / f"cluster.{suffix}"
    file.write_text(json.dumps(data) if suffix == "json" else yaml.safe_dump(data))
    with pytest.raises(ConfigError) as caught:
        read_cluster(file)
    assert str(caught.value).startswith(f"{file}: {told}")


def test_a_file_that_is_none(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml: No such file"):
        read_cluster(file)
    with pytest.raises(ConfigError, match=r"cluster\.yaml: line 1: is not YAML"):
        of(file, "a: b: c")
    with pytest.raises(ConfigError, match="name: is given twice"):
        of(file, "name: a\nname: b\n")


# --- secrets --------------------------------------------------------------------------------------

SECRET = "hunter2-hunter2"


def test_a_password_has_no_place_in_the_file(file: Path) -> None:
    for text in (
        f"store: {{url: 'redis://:{SECRET}@h'}}",
        f"store: {{password: '{SECRET}'}}",
        f"store: {{url: ['{SECRET}']}}",
        f"drain_s: '{SECRET}'",
    ):
        with pytest.raises(ConfigError) as caught:
            of(file, text)
        assert SECRET not in str(caught.value)


def test_the_password_comes_from_the_environment_or_a_file(file: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "url").write_text(f"redis://:{SECRET}@filed:1\n")
    with_file = of(file, "store: {url: 'redis://given:1', password_file: secret}").store_config({})
    assert with_file.password() == SECRET
    whole = of(file, "store: {url_file: url}")
    assert whole.store_config({}).password() == SECRET
    there = whole.store_config({"REDIS_URL": "redis://:other@h"})
    assert there.password() == "other", "the environment wins"
    for told in (repr(with_file), repr(whole.store_config({})), repr(whole), whole.to_json()):
        assert SECRET not in told


def test_a_secret_file_that_is_not_there_is_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"store\.url_file: {tmp_path}/gone"):
        of(file, "store: {url_file: gone}").store_config({})


def test_a_bad_url_in_the_environment_is_not_shown(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        of(file, "{}").store_config({"REDIS_URL": f"http://:{SECRET}@h"})
    assert str(caught.value).startswith("REDIS_URL: must begin with redis://")
    assert SECRET not in str(caught.value)
