"""A bad configuration is refused at start, and the field named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from dspark.core.errors import ConfigError
from dspark.scheduler import StepCost
from dspark.scheduler.simulation import config_of, read_config

from .simulated import table


def with_value(path: str, value: Any) -> dict[str, Any]:
    """A sound table but for one value. path: names and numbers between dots."""
    whole = copy.deepcopy(table())
    whole["tenants"] = [{"name": "a"}]
    whole["drafters"] = [{"tokens_per_s": 100.0}]
    at: Any = whole
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    at[int(last) if last.isdigit() else last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("durations", 3, "durations: is not a known field"),
        ("duration_s", "long", "duration_s: 'long' must be a number"),
        ("duration_s", 0, "duration_s: 0 must be above 0"),
        ("duration_s", float("inf"), "duration_s: inf must be a finite number"),
        ("warmup_s", float("nan"), "warmup_s: nan must be a finite number"),
        ("warmup_s", 20.0, "warmup_s: 20 must be below duration_s"),
        ("seed", 1.5, "seed: 1.5 must be a whole number"),
        ("seed", True, "seed: True must be a whole number"),
        ("seed", -1, "seed: -1 must be in"),
        ("preset", "v5", "preset: 'v5' must be one of v4-flash, v4-pro"),
        ("verifiers", [], "verifiers: must have at least one entry"),
        ("verifiers", {}, "verifiers: {} must be a list"),
        ("verifiers.0.count", 0, "verifiers[0].count: 0 must be in"),
        ("verifiers.0.prefills", 1, "verifiers[0].prefills: 1 must be true or false"),
        ("verifiers.0.speed", 1, "verifiers[0].speed: is not a known field"),
        ("verifiers.0.step_cost", 3, "verifiers[0].step_cost: 3 must be a text or a table"),
        ("verifiers.0.step_cost", "no-such", "verifiers[0].step_cost: 'no-such' is no preset"),
        ("verifiers.0.step_cost", {"tokens": [1]}, "verifiers[0].step_cost.table_s: is missing"),
        (
            "verifiers.0.step_cost",
            {"tokens": [1, 2], "table_s": [0.0, 1.0]},
            "verifiers[0].step_cost.step cost: table_s[0]",
        ),
        ("verifiers.0.max_step_tokens", 8, "verifiers[0].max_step_tokens: 8 is below"),
        ("domains.0.acceptance", 1.5, "domains[0].acceptance: 1.5 must be in [0, 1]"),
        ("domains.0.acceptance", [0.5, 2], "domains[0].acceptance[1]: 2 must be in [0, 1]"),
        ("domains.0.acceptance", [], "domains[0].acceptance: must have at least one"),
        ("domains.0.acceptance", "high", "domains[0].acceptance: 'high' must be a number or a"),
        ("domains.0.spread", 0.4, "domains[0].spread: 0.4 must be below"),
        ("domains.0.name", "", "domains[0].name: '' must be a printable name"),
        ("domains", [{"name": "a"}], "domains[0].acceptance: is missing"),
        (
            "domains",
            [{"name": "a", "acceptance": 0.5}, {"name": "a", "acceptance": 0.5}],
            "domains[1].name: 'a' is given twice",
        ),
        ("arrivals.kind", "tides", "arrivals.kind: 'tides' must be one of closed, poisson"),
        ("arrivals.users", 0, "arrivals.users: 0 must be in"),
        ("arrivals.rate", 0, "arrivals.rate: 0 must be above 0"),
        ("arrivals.answer", 0, "arrivals.answer: 0 must be in"),
        ("arrivals.answer", {"mean": 0.5}, "arrivals.answer.mean: 0.5 must be at least 1"),
        ("arrivals.answer", {"least": 9, "most": 8}, "arrivals.answer.least: 9 must be at most"),
        ("arrivals.answer", {"kind": "pareto"}, "arrivals.answer.kind: 'pareto' must be one of"),
        ("drafting.gamma", 65, "drafting.gamma: 65 must be in [1, 64]"),
        ("drafters.0.tokens_per_s", 0, "drafters[0].tokens_per_s: 0 must be above 0"),
        ("drafters", [{}], "drafters[0].tokens_per_s: is missing"),
        ("tenants.0.share", 0, "tenants[0].share: 0 must be above 0"),
        ("tenants.0.domains", ["b"], "tenants[0].domains: 'b' is not one of all"),
        ("policies", ["sometimes"], "arms[0].policy: 'sometimes' must be early-stop, top-k"),
        ("policies", "none", "policies: 'none' must be a list"),
        ("policies", [3], "arms[0].policy: 3 must be a text"),
        ("policies", ["none", "none"], "arms[1].name: 'none' is given twice"),
        ("policies", [], "arms: must have at least one entry"),
        ("arms", [{"policy": "none", "gamma": 0}], "arms[0].gamma: 0 must be in [1, 64]"),
        ("sweep.users", [0], "sweep.users[0]: 0 must be in"),
        ("sweep", {"users": [1], "drafters": [1]}, "sweep.users: only one of"),
        ("sweep.rate", [1.0], "sweep.rate: needs arrivals.kind"),
        ("scheduler.old_steps", 0, "scheduler.old_steps: 0 must be in [1, 16]"),
        ("network_s", -1, "network_s: -1 must be in [0, 10]"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(path: str, value: Any, told: str) -> None:
    config_of(with_value("seed", 0))  # sound
    with pytest.raises(ConfigError) as error:
        config_of(with_value(path, value))
    assert str(error.value).startswith(told)


def test_policies_and_arms_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="policies: may not stand beside arms"):
        config_of(table(policies=["none"], arms=[{"policy": "none"}]))


def test_a_file_is_named_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for text, told in (
        ("seed =", "is not TOML"),
        ("seed = 'x'", "seed: 'x' must be a whole number"),
        ("seed = 1", "verifiers: is missing"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=told) as error:
            read_config(file)
        assert str(error.value).startswith(f"{file}: ")
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_config(tmp_path / "none.toml")


def test_a_step_cost_comes_from_a_file_beside_it(tmp_path: Path) -> None:
    cost = StepCost((1, 16), (0.01, 0.03), 1e-4)
    cost.save(tmp_path / "cost.json")
    file = tmp_path / "a.toml"
    file.write_text(
        "[[verifiers]]\nstep_cost = 'cost.json'\n[[domains]]\nname = 'a'\nacceptance = 0.5\n"
    )
    assert read_config(file).verifiers[0].cost == cost
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"verifiers\[0\]\.step_cost: .*cost\.json"):
        read_config(file)


def test_a_preset_gives_what_the_file_leaves_out() -> None:
    config = config_of({"preset": "v4-flash", "duration_s": 6.0, "sweep": {"users": [4]}})
    assert config.duration_s == 6.0
    assert config.sweep.users == (4,)
    assert [arm.label for arm in config.arms] == ["mtp-1", "dspark"]
    assert config.drafting.gamma == 5


def test_the_examples_can_be_read() -> None:
    examples = Path(__file__).parents[3] / "examples" / "simulate"
    found = sorted(examples.glob("*.toml"))
    assert len(found) >= 4
    for file in found:
        read_config(file)
