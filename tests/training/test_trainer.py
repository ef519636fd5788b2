"""Steps: what they change, what changes nothing, how a run goes on, and where it stops."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from dspark.core.errors import ConfigError
from dspark.models.drafters.checkpoint import load_checkpoint
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import TARGET_TENSORS, Trunk
from dspark.training.config import TrainConfig, TrainingSection
from dspark.training.curve import read_curve
from dspark.training.errors import DataError, TrainingStopped
from dspark.training.examples import Example, Layout
from dspark.training.exchange import Exchange
from dspark.training.losses import Weights
from dspark.training.run_state import states
from dspark.training.shard_writer import ShardWriter
from dspark.training.sources import order, split, steps
from dspark.training.trainer import Trainer, learning_rate
from dspark.training.training_run import train

from ..cli.conftest import make_checkpoint
from ..models.drafters.scene import KINDS, tiny_drafter
from .scene import Examples, example, layout, some

WEIGHTS = {
    "dflash": Weights(1.0, 0.0, 0.0),
    "eagle3": Weights(0.0, 0.0, 0.0, 1.0),
    "mtp": Weights(0.0, 0.0, 0.0, 1.0),
}


def trainable(kind: str) -> Trunk:
    model = tiny_drafter(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in TARGET_TENSORS)
    return model


def section(**changes: Any) -> TrainingSection:
    return TrainingSection(
        **{"steps": 40, "sequences": 3, "anchors": 4, "learning_rate": 3e-3, **changes}
    )


def trainer(kind: str = "markov", **changes: Any) -> Trainer:
    model = trainable(kind)
    exchange = changes.pop("exchange", None)
    source = changes.pop("source", None) or some(6, layout(model.config.target_layer_ids))
    return Trainer(
        model,
        source,
        range(len(source.lengths)),
        section(**changes),
        WEIGHTS.get(kind, Weights()),
        exchange=exchange,
    )


def parameters(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in one.drafter.named_parameters()}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_learns_what_it_is_shown(kind: str) -> None:
    """The same few answers again and again; the target's own tensors stay as they are."""
    one = trainer(kind)
    before = parameters(one)
    first = one.held_out(range(6))
    for _ in range(40):
        report = one.advance()
    last = one.held_out(range(6))
    assert last["loss"] < 0.8 * first["loss"]
    assert last["tau"] > first["tau"]
    assert report.step == 40
    for name, parameter in one.drafter.named_parameters():
        changed = not torch.equal(parameter, before[name])
        assert changed == (name not in TARGET_TENSORS), name


@pytest.mark.parametrize("kind", ["markov", "eagle3"])
def test_products_in_bfloat16_learn_too(kind: str) -> None:
    exact, rounded = trainer(kind), trainer(kind, precision="bfloat16")
    first = exact.advance().figures["loss"]
    assert rounded.advance().figures["loss"] == pytest.approx(first, rel=0.02)
    for _ in range(39):
        report = rounded.advance()
    assert report.figures["loss"] < 0.8 * first
    assert all(p.dtype == torch.float32 for p in rounded.drafter.parameters())


@pytest.mark.parametrize("kind", ["rnn", "reduced", "eagle3"])
@pytest.mark.parametrize("how", [{"together": 1}, {"chunk_rows": 3}, {"together": 2}])
def test_how_much_runs_at_once_changes_no_result(kind: str, how: dict[str, int]) -> None:
    usual, other = trainer(kind), trainer(kind, **how)
    for _ in range(3):
        a, b = usual.advance(), other.advance()
        assert a.figures == pytest.approx(b.figures, rel=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


def test_each_step_has_anchors_of_its_own() -> None:
    """Parameters hardly move, so it is the blocks that make the losses differ; and they are a
    function of the step."""
    source = Examples([example(5, 60)])
    runs = []
    for _ in range(2):
        one = trainer(source=source, sequences=1, anchors=2, learning_rate=1e-12)
        runs.append([one.advance().figures["loss"] for _ in range(4)])
    assert runs[0] == runs[1]
    assert len({round(loss, 4) for loss in runs[0]}) == 4


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    """But for products whose cost goes by their smallest part, such as the confidence head's."""
    one = trainer(kind, together=8)
    with FlopCounterMode(display=False) as counter:
        report = one.advance()
    assert report.flops == pytest.approx(counter.get_total_flops(), rel=0.06)


class Meeting:
    """Workers in threads that add up what they bring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._brought: dict[int, torch.Tensor] = {}
        self._gate = threading.Barrier(size)

    def sum(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._brought[rank] = tensor.clone()
        self._gate.wait()
        total = sum(self._brought[rank] for rank in range(self.size))
        self._gate.wait()
        assert isinstance(total, torch.Tensor)
        return total

    def together(self, work: Callable[[Exchange], Any]) -> list[Any]:
        """What each worker's `work` returns."""
        found: list[Any] = [None] * self.size

        def go(rank: int) -> None:
            try:
                found[rank] = work(Worker(self, rank))
            except BaseException as error:
                found[rank] = error
                self._gate.abort()

        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Worker:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meeting.sum(self.rank, tensor)


@pytest.mark.parametrize("kind", ["markov", "eagle3"])
def test_two_workers_walk_the_path_of_one(kind: str) -> None:
    """Answers of unequal length, so a mean of the workers' means would be another number."""

    def work(exchange: Exchange) -> Any:
        one = trainer(kind, exchange=exchange)
        reports = [one.advance() for _ in range(5)]
        return reports, one.held_out(range(6)), parameters(one)

    (alone,) = Meeting(1).together(work)
    for reports, held_out, found in Meeting(2).together(work):
        for one, other in zip(reports, alone[0], strict=True):
            assert one.figures == pytest.approx(other.figures, rel=1e-4)
            assert one.block_tokens == other.block_tokens
            assert one.flops == pytest.approx(other.flops)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
        assert held_out["loss"] == pytest.approx(alone[1]["loss"], rel=1e-4)
        assert held_out["accepted"] == alone[1]["accepted"]
        # Adam turns the rounding of a gradient that is nearly 0 into part of a step.
        for name, value in found.items():
            assert (value - alone[2][name]).abs().mean() < 1e-5, name


def test_a_loss_that_is_no_number_stops_before_the_step() -> None:
    made = [example(4, 12, seed=i) for i in range(4)]
    broken = made[2].features.clone()
    broken[5] = torch.nan
    made[2] = replace(made[2], features=broken)
    one = trainer(source=Examples(made), sequences=4)
    before = parameters(one)
    with pytest.raises(TrainingStopped, match=r"step 1: loss.* not a finite number.*lines 1, 2, 3"):
        one.advance()
    assert all(torch.equal(before[name], value) for name, value in parameters(one).items())
    assert one.step == 0


def test_the_rate_rises_and_falls() -> None:
    config = section(steps=100, warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] < 0.001


def test_an_order_has_every_answer_once_an_epoch() -> None:
    domains = ["a"] * 5 + ["b"] * 2
    for epoch in range(3):
        assert sorted(order(range(7), domains, epoch, 0, balance=False)) == list(range(7))
    taken = order(range(7), domains, 0, 0, balance=True)
    assert sorted(taken)[:5] == list(range(5))
    assert len(taken) == 10
    assert order(range(7), domains, 0, 0, balance=False) != order(
        range(7), domains, 1, 0, balance=False
    )


def test_steps_go_on_from_anywhere() -> None:
    """Batches that span two epochs, too."""
    domains = [""] * 7
    walk = steps(range(7), domains, 3, 0, balance=False)
    whole = [next(walk) for _ in range(12)]
    for first in range(12):
        later = steps(range(7), domains, 3, 0, balance=False, first=first)
        assert [next(later) for _ in range(12 - first)] == whole[first:]
    assert sorted(i for batch in whole[:7] for i in batch) == sorted([*range(7)] * 3)


def test_all_answers_to_a_line_are_on_one_side() -> None:
    made = [example(3, 9, seed=i, line=1 + i // 2) for i in range(400)]
    train_on, held = split(Examples(made), 0.2)
    assert len(held) == pytest.approx(80, abs=30)
    lines = [{made[i].origin.line for i in part} for part in (train_on, held)]
    assert not lines[0] & lines[1]
    assert sorted([*train_on, *held]) == list(range(400))
    assert split(Examples([example(3, 1)]), 0.0) == ([], [])


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of made-up answers of the tiny target."""
    folder = tmp_path_factory.mktemp("data")
    tensors = TargetTensors.read(target)
    like = Layout((-1, 0), 64, 12)
    facts = {
        "target_id": "tiny",
        "tokenizer_hash": "words",
        "vocab_size": tensors.vocab_size,
        "embedding_hash": tensors.embedding_hash,
    }
    writer = ShardWriter(folder, like, facts, shard_tokens=100)
    for i in range(14):
        writer.add(example(5, 10 + i, seed=i, like=like, domain="ab"[i % 2]))
    writer.flush()
    return folder


def config(target: Path, data: Path, run: Path, /, **changes: dict[str, Any]) -> TrainConfig:
    facts: dict[str, dict[str, Any]] = {
        "drafter": {"gamma": 3, "layers": 1, "rank": 8, "draft_vocab": 100},
        "data": {"folders": [str(data)], "held_out": 0.2},
        "training": {"steps": 12, "sequences": 3, "anchors": 4},
        "run": {"folder": str(run), "checkpoint_steps": 4, "log_steps": 1, "evaluate_steps": 6},
    }
    for name, change in changes.items():
        facts[name] = {**facts.get(name, {}), **change}
    return TrainConfig(target=str(target), **facts)


def curve(run: Path) -> list[dict[str, Any]]:
    """Without what a clock says."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_curve(run)]


@pytest.mark.parametrize("stops", [[8], [5], [2, 3, 7]])
def test_a_run_that_is_killed_goes_on_with_the_same_curve(
    target: Path, data: Path, tmp_path: Path, stops: list[int]
) -> None:
    """Bit for bit. A run leaves off anywhere, also between two checkpoints."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config(target, data, whole))
    for stop in stops:
        train(config(target, data, parts), stop_at=stop)
    (parts / ".state-00000008.partial").mkdir()  # a kill in the middle of a checkpoint
    train(config(target, data, parts))
    assert curve(parts) == curve(whole)
    assert [line["step"] for line in curve(whole) if line["kind"] == "train"] == [*range(1, 13)]
    one, other = (load(run, target) for run in (whole, parts))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_answers_are_read_as_training_goes(target: Path, tmp_path: Path) -> None:
    lines = [{"prompt_ids": [5, 6], "answer_ids": [i, 9, 7, i, 9, 8]} for i in range(10, 20)]
    answers = tmp_path / "lines.jsonl"
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"folders": [], "answers": str(answers)}
    run = tmp_path / "run"
    train(config(target, answers, run, data=given), stop_at=4)
    assert train(config(target, answers, run, data=given)).step == 12
    assert [line["step"] for line in curve(run) if line["kind"] == "train"] == [*range(1, 13)]


def load(run: Path, target: Path) -> dict[str, torch.Tensor]:
    found = load_checkpoint(states(run)[-1].drafter, TargetTensors.read(target))
    return dict(found.model.state_dict())


def test_a_checkpoint_is_a_drafter_that_says_what_it_was_trained_on(
    target: Path, data: Path, tmp_path: Path
) -> None:
    outcome = train(config(target, data, tmp_path / "run"))
    found = load_checkpoint(outcome.drafter, TargetTensors.read(target))
    assert outcome.step == found.training["step"] == 12
    assert found.target.target_id == "tiny"
    assert found.target.tokenizer_hash == "words"
    assert len(found.model.vocabulary) == 100
    assert found.training["config"]["training"]["steps"] == 12
    assert found.training["held_out"]["tau"] == outcome.held_out["tau"] >= 1.0
    tokens = sum(line["block_tokens"] for line in curve(tmp_path / "run") if "block_tokens" in line)
    assert found.training["spent"]["tokens"] == tokens
    assert found.training["spent"]["flops"] > 0
    assert [state.step for state in states(tmp_path / "run")] == [8, 12]


def test_a_half_written_checkpoint_is_not_taken_for_one(
    target: Path, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(config(target, data, run), stop_at=8)
    weights = states(run)[-1].drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"model\.safetensors.*delete .*state-00000008 to go on"):
        train(config(target, data, run))
    shutil.rmtree(states(run)[-1].folder)
    assert train(config(target, data, run)).step == 12
    (states(run)[-1].folder / "optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"optimizer\.safetensors: is damaged"):
        train(config(target, data, run))


def test_another_configuration_is_refused_with_both_values(
    target: Path, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(config(target, data, run), stop_at=4)
    with pytest.raises(DataError, match=r"begun with training.anchors = 4, now it is 5"):
        train(config(target, data, run, training={"anchors": 5}))
    train(config(target, data, run, run={"log_steps": 3}))  # says nothing of the curve


def test_a_run_goes_on_with_less_memory(target: Path, data: Path, tmp_path: Path) -> None:
    """What bounds memory says nothing of the curve. It stands in the checkpoint all the same."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config(target, data, whole))
    train(config(target, data, parts), stop_at=4)
    assert states(parts)[-1].facts["config"]["training"]["together"] == 8
    train(config(target, data, parts, training={"together": 1, "chunk_rows": 3}))
    assert len(curve(parts)) == len(curve(whole))
    for ours, theirs in zip(curve(parts), curve(whole), strict=True):
        assert (ours["step"], ours["kind"]) == (theirs["step"], theirs["kind"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        if ours["kind"] == "train":
            assert ours["block_tokens"] == theirs["block_tokens"]


@pytest.mark.parametrize(("every", "step"), [(4, 6), (1, 5)])
def test_no_number_stops_a_run_and_names_the_checkpoint_that_is_left(
    target: Path, data: Path, tmp_path: Path, every: int, step: int
) -> None:
    """Neither a loss that is none, nor parameters that are about to be kept."""
    run = tmp_path / "run"
    often = {"checkpoint_steps": every}
    train(config(target, data, run, run=often), stop_at=4)
    kept = states(run)[-1].folder
    poison(kept)
    told = f"step {step}: .*not .*finite.*the last good checkpoint is {kept}"
    with pytest.raises(TrainingStopped, match=told):
        train(config(target, data, run, run=often))
    assert states(run)[-1].folder == kept


def poison(state: Path) -> None:
    """Moments so large that the next step's parameters are infinite."""
    file = state / "optimizer.safetensors"
    held = load_file(file)
    for name in held:
        if name.startswith("exp_avg."):
            held[name] = torch.full_like(held[name], torch.inf)
    save_file(held, file)


def test_data_of_another_target_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(data, other)
    for name, value, told in (
        ("vocab_size", 7, "vocabulary is 7"),
        ("embedding_hash", "else", "embedding is 'else'"),
    ):
        facts = json.loads((data / "data.json").read_text())
        (other / "data.json").write_text(json.dumps({**facts, name: value}))
        with pytest.raises(DataError, match=told):
            train(config(target, other, tmp_path / "run"))
    two = {"folders": [str(data), str(other)]}
    (other / "data.json").write_text(json.dumps({**facts, "target_id": "another"}))
    with pytest.raises(DataError, match=r"'another'.*'tiny'.*together"):
        train(config(target, data, tmp_path / "run", data=two))


def test_layers_that_the_data_does_not_keep_are_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"no features of layer 3, only of \[-1, 0\]"):
        train(config(target, data, tmp_path, drafter={"layer_ids": [0, 3]}))
    outcome = train(config(target, data, tmp_path / "one", drafter={"layer_ids": [0]}), stop_at=1)
    assert outcome.step == 1
    with pytest.raises(ConfigError, match="draft_vocab"):
        train(config(target, data, tmp_path / "two", drafter={"draft_vocab": 10_000}))


def test_answers_without_features_are_read_as_training_goes(target: Path, tmp_path: Path) -> None:
    """The same curve as from shards of the same answers."""
    from dspark.models import load_target
    from dspark.models.targets.transformers import TransformersBackend
    from dspark.training.generation import read_given
    from dspark.training.jobs import plan_jobs
    from dspark.training.prompts import Room, read_prompts

    lines = tmp_path / "answers.jsonl"
    made = [example(5, 12 + i, seed=i) for i in range(5)]
    texts = [
        {"prompt_ids": e.token_ids[:5].tolist(), "answer_ids": e.token_ids[5:].tolist()}
        for e in made
    ]
    lines.write_text("".join(json.dumps(line) + "\n" for line in texts))
    backend = TransformersBackend(load_target(target, dtype=torch.float32, device="cpu"))
    tensors = TargetTensors.read(target)
    writer = ShardWriter(
        tmp_path / "data",
        Layout((0,), 64, 64),
        {"vocab_size": tensors.vocab_size, "embedding_hash": tensors.embedding_hash},
    )
    read, _ = read_prompts(lines, lambda _: (), Room(160, 512))
    jobs = plan_jobs(read, 9, (), balance=False, seed=0)
    read_given(backend, writer.layout, sorted(jobs, key=lambda job: job.name), writer)
    drafter = {"layer_ids": [0], "draft_vocab": 0}
    online = config(
        target,
        tmp_path,
        tmp_path / "online",
        drafter=drafter,
        data={"folders": [], "answers": str(lines), "held_out": 0.0},
    )
    shards = config(
        target,
        tmp_path / "data",
        tmp_path / "shards",
        drafter=drafter,
        data={"held_out": 0.0},
    )
    train(online, stop_at=3)
    train(shards, stop_at=3)
    losses = [[line["loss"] for line in curve(tmp_path / name)] for name in ("online", "shards")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_event_files_are_written_where_they_can_be(
    target: Path, data: Path, tmp_path: Path
) -> None:
    wanted = config(target, data, tmp_path, run={"tensorboard": True})
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ConfigError, match=r"run.tensorboard: .*pip install 'dspark\[train\]'"):
            train(wanted, stop_at=1)
    else:
        train(wanted, stop_at=1)
        assert list((tmp_path / "tensorboard").iterdir())


def test_examples_are_whole() -> None:
    """The scene itself: what is kept and the rest are a distribution."""
    made: Example = example(seed=3)
    total = made.target.top_p.float().sum(-1) + made.target.tail
    assert torch.allclose(total, torch.ones(len(total)), atol=2e-3)
