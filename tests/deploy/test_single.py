"""A checkpoint becomes an engine. The clock is an argument: every step takes one tick of it, so
what a step costs here does not depend on the machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
import torch

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError, InvalidRequest, ModelError
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import Loaded, Progress, TargetConfig, load
from dspark.scheduler import StepCost

from ..cli.conftest import CONTEXT, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Start:
    """One start of the tiny model, and what it told on the way."""

    config: TargetConfig
    lines: list[str] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, *, profile: bool = False) -> Loaded:
        self.lines.clear()
        self.steps.clear()
        progress = Progress(self.lines.append, lambda *step: self.steps.append(step))
        ticks = count()
        return load(self.config, progress, profile=profile, clock=lambda: float(next(ticks)))


@pytest.fixture
def start(checkpoint: Path) -> Start:
    return Start(TargetConfig(model=str(checkpoint), engine=EngineConfig(max_step_tokens=64)))


def kept(cache: Path) -> Path:
    (file,) = (cache / "step-cost").iterdir()
    return file


# --- what a step costs ---------------------------------------------------------------------------


def test_the_first_start_measures_and_the_second_remembers(start: Start, cache: Path) -> None:
    first = start()
    assert first.profiled
    assert start.lines == ["measuring what a step costs on this machine (once)"]
    assert start.steps[-1][0] == start.steps[-1][1] == len(start.steps)
    assert StepCost.load(kept(cache)) == first.cost
    assert set(first.cost.table_s) == {1.0}
    second = start()
    assert not second.profiled
    assert (start.lines, start.steps) == ([], [])
    assert second.cost == first.cost


def test_to_profile_is_to_measure_again(start: Start) -> None:
    start()
    assert start(profile=True).profiled
    assert start.lines == ["measuring what a step costs on this machine (once)"]


@pytest.mark.parametrize("text", ["", "nonsense", "[1, 2]", '{"tokens": [1], "table_s": [-1.0]}'])
def test_a_damaged_file_is_measured_again_with_a_line(start: Start, cache: Path, text: str) -> None:
    start()
    file = kept(cache)
    file.write_text(text)
    assert start().profiled
    (line,) = start.lines
    assert line.startswith("measuring what a step costs on this machine (again: the kept figures")
    assert str(file) in line
    assert not start().profiled


def test_a_cost_that_does_not_fit_the_machine_is_measured_again_with_a_line(
    start: Start, cache: Path
) -> None:
    honest = start().cost
    StepCost.from_table({1: 1.0, 8: 5.0, 64: 5.0}).save(kept(cache))
    again = start()
    assert again.profiled
    assert again.cost == honest
    (line,) = start.lines
    assert line.endswith("(again: the kept figures do not fit it any more)")


def test_a_cost_of_another_speed_serves(start: Start, cache: Path) -> None:
    start()
    StepCost.from_table({1: 20.0, 64: 20.0}).save(kept(cache))
    loaded = start()
    assert not loaded.profiled
    assert loaded.cost.table_s == (20.0, 20.0)


@pytest.mark.parametrize(("step_s", "told_s"), [(0.3, 0.5), (20.0, 10.0)])
def test_a_full_step_does_not_look_like_a_death(
    start: Start, cache: Path, step_s: float, told_s: float
) -> None:
    """Signs of life are given between steps, and three that are missed are one."""
    start()
    StepCost.from_table({1: step_s, 64: step_s}).save(kept(cache))
    assert start().engine.config.heartbeat_s == told_s


def test_a_cache_that_cannot_be_written_costs_a_line_each(start: Start, cache: Path) -> None:
    cache.write_text("no directory")
    loaded = start()
    assert loaded.profiled
    weights, again, kept = start.lines
    assert "the packed weights are not shared with other processes" in weights
    assert again.startswith("measuring what a step costs on this machine (again: ")
    assert kept.startswith("the step cost could not be kept (")
    assert "the next start measures again" in kept
    assert len(answer(loaded)) == 5


@pytest.mark.usefixtures("threads")
def test_what_a_step_costs_is_kept_by_precision_and_threads(
    start: Start, cache: Path, checkpoint: Path
) -> None:
    def names() -> set[str]:
        return {file.name for file in (cache / "step-cost").iterdir()}

    engine = start.config.engine
    seen: set[str] = set()
    for config in (
        TargetConfig(str(checkpoint), threads=1, engine=engine),
        TargetConfig(str(checkpoint), threads=2, engine=engine),
        TargetConfig(str(checkpoint), threads=1, dtype="bfloat16", engine=engine),
    ):
        loaded = Start(config)()
        assert loaded.profiled
        assert loaded.threads == config.threads
        assert len(names() - seen) == 1
        seen = names()


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "token_bytes"), [("float32", 512), ("bfloat16", 256)])
def test_a_cache_beyond_the_memory_is_refused_before_anything_is_measured(
    checkpoint: Path, cache: Path, dtype: str, token_bytes: int
) -> None:
    """2 layers of 2 heads of 16 values, keys and values."""
    engine = EngineConfig(kv_tokens=10**14, max_step_tokens=64)
    start = Start(TargetConfig(model=str(checkpoint), dtype=dtype, engine=engine))
    needed = token_bytes * 10**14
    told = (
        rf"^kv_tokens: {10**14} need {needed} bytes \({token_bytes} a token\), and there are \d+:"
    )
    with pytest.raises(ConfigError, match=told):
        start()
    assert (start.lines, start.steps) == ([], [])
    assert not (cache / "step-cost").exists()


# --- the engine ----------------------------------------------------------------------------------


FIVE = Request("a", (5, 6, 7), SamplingParams(temperature=0, max_tokens=5))


def answer(loaded: Loaded, request: Request = FIVE) -> list[int]:
    loaded.engine.submit(request)
    ids: list[int] = []
    while not loaded.engine.idle:
        for _, event in loaded.engine.step():
            if isinstance(event, Committed):
                ids += event.ids
    return ids


def test_the_engine_is_as_the_configuration_says(checkpoint: Path) -> None:
    engine = EngineConfig(kv_tokens=512, gamma=3, verify="fixed:2", max_step_tokens=64)
    loaded = Start(TargetConfig(str(checkpoint), engine=engine))()
    limits = loaded.engine.limits
    assert (limits.context_length, limits.kv_tokens) == (CONTEXT, 512)
    assert limits.vocab_size == loaded.tokenizer.vocab_size
    assert loaded.engine.drafters["ngram"].card.gamma == 3
    assert len(answer(loaded)) == 5
    ended = Request("b", (5,), SamplingParams(temperature=0, logit_bias={1: 100.0}, max_tokens=9))
    assert answer(loaded, ended) == [1], "the tokenizer's end of text ends an answer"


@pytest.mark.parametrize(
    "config",
    [{"drafter": "none"}, {"engine": EngineConfig(gamma=0, max_step_tokens=64)}],
    ids=["none", "no block"],
)
def test_no_drafter(checkpoint: Path, config: dict[str, object]) -> None:
    loaded = Start(TargetConfig(str(checkpoint), **config))()  # type: ignore[arg-type]
    assert loaded.engine.drafters == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "vllm"),
        ("dtype", "int4"),
        ("drafter", "magic"),
        ("device", "cuda:x"),
        ("device", ""),
        ("threads", -1),
        ("threads", 10**6),
    ],
)
def test_a_value_that_is_not_served(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: {value!r} "):
        TargetConfig(**{field: value})  # type: ignore[arg-type]


def test_a_policy_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match=r"^verify: 'sometimes' must be"):
        TargetConfig(engine=EngineConfig(verify="sometimes"))


def that_does_not_fit(checkpoint: Path, room: Path) -> Path:
    """A copy that only transformers serves."""
    other = room / "gelu"
    shutil.copytree(checkpoint, other)
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**facts, "hidden_act": "gelu"}))
    return other


def test_where_the_native_backend_does_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    """A command goes on with the other one and says what it runs; a replica does not, as the others
    of its pool would go on with its answers in other arithmetic."""
    other = that_does_not_fit(checkpoint, tmp_path)
    engine = EngineConfig(max_step_tokens=64)
    config = TargetConfig(str(other), backend="native", dtype="int8", engine=engine)
    loaded = Start(config)()
    assert (loaded.config.backend, loaded.config.dtype) == ("transformers", "float32")
    assert loaded.backend.name == "transformers-float32-cpu"
    for named in (config, replace(config, backend="auto")):
        with pytest.raises(ModelError, match=r"^backend: the native one does not .* hidden_act"):
            load(named, exact=True)


def test_auto_is_native_where_that_serves(checkpoint: Path, tmp_path: Path) -> None:
    """Also in a pool, and a line says so where it is not."""
    engine = EngineConfig(max_step_tokens=64)
    assert TargetConfig().backend == "auto"
    fits = Start(TargetConfig(str(checkpoint), engine=engine))
    assert fits().config.backend == "native"
    assert not [line for line in fits.lines if "does not serve here" in line]
    other = that_does_not_fit(checkpoint, tmp_path)
    for exact in (False, True):
        lines: list[str] = []
        loaded = load(
            TargetConfig(str(other), engine=engine), Progress(line=lines.append), exact=exact
        )
        assert loaded.config.backend == "transformers"
        [line] = [line for line in lines if "does not serve here" in line]
        assert line.startswith("the native backend does not serve here, transformers does: hidden")
    assert not TargetConfig(device="cuda").tries_native
    assert not TargetConfig(dtype="bfloat16").tries_native


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="does not go to device 'cuda'"):
        Start(TargetConfig(str(checkpoint), device="cuda"))()
