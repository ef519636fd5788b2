"""What operators change, on a Serve that is scripted: which configurations are put, in which order,
and what is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dspark.core.errors import (
    ConfigError,
    DeadlineExceeded,
    ModelError,
    NotFound,
    Unavailable,
)
from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.ray import changes
from dspark.deploy.ray.changes import Patience
from dspark.deploy.ray.observed import MARK, seen
from dspark.deploy.ray.serve_config import serve_config


@dataclass
class Serve:
    """A `Door` behind which all is done at once, but for pools that `fails` says cannot start.
    puts: what was to be deployed, as {pool: args}."""

    fails: Callable[[dict[str, Any]], str] = lambda _: ""
    applications: dict[str, dict[str, Any]] = field(default_factory=dict)
    puts: list[dict[str, Any]] = field(default_factory=list)
    stuck: bool = False

    def details(self) -> dict[str, Any]:
        return {"applications": copy.deepcopy(self.applications)}

    def put(self, config: Mapping[str, Any]) -> None:
        self.puts.append({one["name"]: one for one in config["applications"]})
        self.applications = {one["name"]: self._application(one) for one in config["applications"]}

    def close(self, *, force: bool, told: Callable[[str], None]) -> None:
        self.applications = {}

    def _application(self, config: dict[str, Any]) -> dict[str, Any]:
        name, options = config["name"], config["deployments"][0]
        wanted = options.get("num_replicas", 1)
        why = self.fails(config)
        state = "STARTING" if why or self.stuck else "RUNNING"
        return {
            "status": "DEPLOY_FAILED" if why else "DEPLOYING" if self.stuck else "RUNNING",
            "message": f"Traceback …\nRuntimeError: {MARK}{why}\n\n" if why else "",
            "deployed_app_config": config,
            "deployments": {
                name: {
                    "target_num_replicas": wanted,
                    "message": "",
                    "replicas": [{"replica_id": f"r{n}", "state": state} for n in range(wanted)],
                }
            },
        }


def patience(seconds: float = 30.0, lines: list[str] | None = None) -> Patience:
    return Patience(seconds, ([] if lines is None else lines).append)


def cluster(**sections: Any) -> dict[str, Any]:
    return serve_config(ClusterConfig.of(sections))


def up(**sections: Any) -> Serve:
    serve = Serve()
    changes.apply(serve, cluster(**sections), patience())
    serve.puts.clear()
    return serve


def test_what_is_new_starts_together() -> None:
    serve = Serve()
    changed = changes.apply(serve, cluster(), patience())
    assert sorted(changed) == ["drafter", "gateway", "scheduler", "verifier"]
    assert len(serve.puts) == 1


def test_what_is_the_same_is_left_alone() -> None:
    serve = up()
    assert changes.apply(serve, cluster(), patience()) == []
    assert serve.puts == []


def test_a_changed_target_goes_pool_by_pool_and_verifiers_before_those_who_ask_them() -> None:
    serve = up()
    lines: list[str] = []
    changed = changes.apply(serve, cluster(model="other/model"), patience(lines=lines))
    assert changed == ["scheduler", "verifier", "drafter", "gateway"]
    models = [
        {name: one["args"]["config"]["model"] for name, one in put.items()} for put in serve.puts
    ]
    assert [sum(model == "other/model" for model in put.values()) for put in models] == [1, 2, 3, 4]
    assert models[1]["verifier"] == "other/model" != models[1]["gateway"]
    assert "verifier: replaced, for a change of model" in lines


def test_a_pool_that_cannot_start_goes_back_to_what_it_was() -> None:
    serve = up()
    before = serve.applications["drafter"]["deployed_app_config"]
    serve.fails = lambda one: "no drafter" if one["args"]["config"]["drafter"].get("gamma") else ""
    with pytest.raises(ModelError, match="drafter cannot start: no drafter; the drafter pool goes"):
        changes.apply(serve, cluster(drafter={"gamma": 3}), patience())
    assert serve.applications["drafter"]["deployed_app_config"] == before
    assert set(serve.applications) == {"scheduler", "gateway", "verifier", "drafter"}


def test_applications_of_others_stay() -> None:
    serve = up()
    other = {"name": "other", "import_path": "x:y", "args": {}, "deployments": [{"name": "other"}]}
    serve.applications["other"] = serve._application(other)
    changes.apply(serve, cluster(drafter={"replicas": 0}, verifier={"replicas": 2}), patience())
    assert set(serve.applications) == {"scheduler", "gateway", "verifier", "other"}
    changes.take_down(serve, patience())
    assert set(serve.applications) == {"other"}


class Shared(Serve):
    """Somebody else deploys all the time: whenever it was looked at, it is something else."""

    looks = 0

    def details(self) -> dict[str, Any]:
        self.looks += 1
        other = {"name": "other", "args": {"look": self.looks}, "deployments": [{"name": "other"}]}
        self.applications["other"] = self._application(other)
        return super().details()

    def put(self, config: Mapping[str, Any]) -> None:
        (other,) = (one for one in config["applications"] if one["name"] == "other")
        assert other["args"] == {"look": self.looks}, "as it was at an earlier look"
        super().put(config)


def test_what_others_deploy_meanwhile_stays() -> None:
    serve = Shared()
    changes.apply(serve, cluster(), patience())
    changes.apply(serve, cluster(model="other/model", drafter={"replicas": 0}), patience())
    changes.scale(serve, "verifier", 2, patience())
    serve.fails = lambda one: "no" if one["name"] == "gateway" else ""
    with pytest.raises(ModelError, match="goes back"):
        changes.apply(serve, cluster(model="third/model"), patience())
    serve.fails = lambda _: ""
    changes.take_down(serve, patience())
    assert set(serve.applications) == {"other"}


@pytest.mark.parametrize(("name", "told"), [("b", "of the cluster 'b'"), (None, "of others")])
def test_pools_of_another_cluster_are_not_taken_over(name: str | None, told: str) -> None:
    serve = up(name=name or "b")
    if name is None:
        serve.applications["scheduler"]["deployed_app_config"]["args"] = {}
    with pytest.raises(ConfigError, match=f"name: 'a': the scheduler that runs there is .*{told}"):
        changes.apply(serve, cluster(name="a"), patience())
    assert serve.puts == []


class Late(Serve):
    """Its state is that of before a put for three looks."""

    stale = 0

    def details(self) -> dict[str, Any]:
        found = super().details()
        if self.stale:
            self.stale -= 1
            for name, application in found["applications"].items():
                application["deployments"] = copy.deepcopy(self.before[name]["deployments"])
        return found

    def put(self, config: Mapping[str, Any]) -> None:
        self.before, self.stale = copy.deepcopy(self.applications), 3
        super().put(config)


def test_scale_waits_until_serve_has_heard_of_it() -> None:
    serve = Late()
    serve.applications = up().applications
    changes.scale(serve, "verifier", 3, patience())
    assert not serve.stale
    assert seen(serve.details())["verifier"].running == 3


def test_gateways_go_first_and_schedulers_last() -> None:
    serve = up()
    changes.take_down(serve, patience())
    assert [sorted(put) for put in serve.puts] == [
        ["drafter", "scheduler", "verifier"],
        ["scheduler"],
        [],
    ]


def test_scale_changes_one_number() -> None:
    serve = up()
    changes.scale(serve, "verifier", 3, patience())
    (put,) = serve.puts
    assert put["verifier"]["deployments"][0]["num_replicas"] == 3
    assert put["drafter"]["deployments"][0]["num_replicas"] == 1
    assert put["verifier"]["args"] == cluster()["applications"][2]["args"]


@pytest.mark.parametrize(
    ("sections", "pool", "replicas", "told"),
    [
        ({}, "gateway", 9, "9 replicas were asked for, and 8 ports"),
        ({}, "verifier", 0, "0 replicas were asked for, 1 is the least"),
        ({}, "scheduler", 2, "scheduler.replicas"),
        ({"drafter": {"autoscale": {"max": 3}}}, "drafter", 2, "is autoscaled, 1 now"),
        (
            {"drafter": {"replicas": "per-node", "resources": {"custom": {"d": 1.0}}}},
            "drafter",
            2,
            "is per-node, 1 now",
        ),
    ],
)
def test_what_a_pool_cannot_be_scaled_to(
    sections: dict[str, Any], pool: str, replicas: int, told: str
) -> None:
    serve = up(**sections)
    with pytest.raises(ConfigError, match=told):
        changes.scale(serve, pool, replicas, patience())
    assert serve.puts == []


def test_a_pool_that_is_not_there() -> None:
    with pytest.raises(NotFound, match="judge: is no pool of this cluster, whose pools are"):
        changes.scale(up(), "judge", 2, patience())


def test_a_wait_has_an_end_and_says_what_is_missing() -> None:
    serve = up()
    serve.stuck = True
    lines: list[str] = []
    with pytest.raises(DeadlineExceeded, match="verifier: 0 of 2 ready, 2 starting"):
        changes.scale(serve, "verifier", 2, patience(0.3, lines))
    assert lines == ["verifier: 0 of 2 ready, 2 starting"]
    changes.scale(serve, "verifier", 2, patience(), wait=False)


def test_a_serve_that_does_not_answer_for_a_while_has_made_nothing_ready() -> None:
    class Away(Serve):
        looks = 0

        def details(self) -> dict[str, Any]:
            self.looks += 1
            if self.looks in (5, 6):
                raise Unavailable("its controller is starting")
            self.stuck = self.looks < 8
            self.applications = {
                name: self._application(one["deployed_app_config"])
                for name, one in self.applications.items()
            }
            return super().details()

    serve = Away()
    serve.applications = up().applications
    lines: list[str] = []
    changes.scale(serve, "verifier", 2, patience(lines=lines))
    assert lines == [
        "verifier: 0 of 2 ready, 2 starting",
        "Serve: its controller is starting",
        "Serve: answers again",
        "verifier: ready",
    ]


def test_serve_says_what_a_replica_says() -> None:
    serve = Serve(fails=lambda one: "model: 'x' is unknown" if one["name"] == "verifier" else "")
    serve.put(cluster())
    assert seen(serve.details())["verifier"].trouble == "model: 'x' is unknown"
    assert seen(serve.details())["gateway"].trouble == ""
