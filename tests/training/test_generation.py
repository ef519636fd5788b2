"""What is kept of an answer is what the target says of it, however the engine came to it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.cli.main import main
from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError
from dspark.models.drafters import NgramDrafter
from dspark.models.targets.features import FeatureProjection
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.training.errors import DataError
from dspark.training.examples import Layout
from dspark.training.generation import generate, read_given, room_for
from dspark.training.jobs import Heat, Job, plan_jobs
from dspark.training.prompts import Prompt
from dspark.training.reading import Reader
from dspark.training.recorder import RecordingBackend
from dspark.training.shard_writer import ShardWriter
from dspark.training.shards import ShardSet

from ..cli.conftest import DSPARK, make_checkpoint
from ..models.tiny import VOCABULARY, text, tiny_model, truths

LAYOUT = Layout((-1, 1, 2), 64, 16, "float16")
MIX = (Heat(0.0), Heat(0.7, 0.9))
# Rounding to float16, and two float32 computations of one sum.
CLOSE = {"atol": 4e-3, "rtol": 2e-3}


def backend() -> TransformersBackend:
    return TransformersBackend(tiny_model("llama"), block_size=4)


def prompts(count: int = 6) -> list[Prompt]:
    """The first two begin alike, so that one finds the other's keys cached."""
    own = [text(5 + 3 * i, seed=i) for i in range(count)]
    own[1] = own[0] + own[1][len(own[0]) :]
    return [Prompt(i + 1, ids, domain="ab"[i % 2]) for i, ids in enumerate(own)]


def jobs(count: int = 6, answers: int = 8) -> list[Job]:
    return plan_jobs(prompts(count), answers, MIX, balance=False, seed=0)


def make(folder: Path, some: list[Job], *, concurrency: int = 3, **rest: Any) -> ShardSet:
    writer = ShardWriter(folder, LAYOUT, {"of": "tests"}, shard_tokens=60)
    drafters = rest.pop("drafters", None)
    config = room_for(some, 12, concurrency, 5 if drafters else 0)
    config = rest.pop("config", replace(config, block_size=4, prefill_chunk=7))
    generate(
        backend(),
        LAYOUT,
        some,
        writer,
        max_tokens=12,
        config=config,
        cost=OnlineStepCost(StepCost.from_table({1: 1.0})),
        eos_ids=(3,),
        drafters=drafters,
        **rest,
    )
    return ShardSet(folder)


def held(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Token ids by job."""
    found = ShardSet(folder)
    return {
        (origin.line, origin.sample): found.read(i).token_ids.tolist()
        for i, origin in enumerate(found.origins)
    }


def check(found: ShardSet) -> None:
    """Every example against transformers' own pass over its ids."""
    assert found.origins
    model = tiny_model("llama")
    for i in range(len(found)):
        one = found.read(i)
        ids = tuple(one.token_ids.tolist())
        (truth,) = truths(model, [ids])
        expected = truth.features(FeatureProjection(LAYOUT.layer_ids)).float()
        assert torch.allclose(one.features[:-1].float(), expected[:-1], **CLOSE)
        assert not one.features[-1].any()
        p = truth.logits[one.prompt_tokens - 1 : -1].double().softmax(-1)
        top = p.topk(LAYOUT.top_k, -1)
        assert torch.allclose(one.target.top_p.double(), top.values, **CLOSE)
        at_kept = p.gather(1, one.target.top_ids.long())
        assert torch.allclose(at_kept, one.target.top_p.double(), **CLOSE)
        assert torch.allclose(one.target.tail.double(), 1.0 - top.values.sum(-1), atol=1e-4)


def test_what_is_kept_is_what_the_target_says(tmp_path: Path) -> None:
    found = make(tmp_path, jobs())
    check(found)
    assert len(list(tmp_path.glob("shard-*"))) > 1
    assert {origin.domain for origin in found.origins} == {"a", "b"}


def test_drafts_change_neither_answers_nor_what_is_kept(tmp_path: Path) -> None:
    """Rows of rejected drafts are overwritten; the text is the target's alone."""
    some = jobs(answers=10)
    plain = make(tmp_path / "plain", some)
    drafter = NgramDrafter(5)
    drafted = make(tmp_path / "drafted", some, drafters={"ngram": drafter})
    check(drafted)
    assert held(tmp_path / "plain") == held(tmp_path / "drafted")
    assert len(plain) == len(drafted)


def test_an_answer_is_read_as_it_was_kept(tmp_path: Path) -> None:
    """`Reader` and `RecordingBackend` agree, whatever the steps are cut into."""
    found = make(tmp_path, jobs())
    texts = [
        (one.token_ids.tolist(), one.prompt_tokens)
        for one in (found.read(i) for i in range(len(found)))
    ]
    for room, step in ((64, 7), (4096, 512)):
        reader = Reader(backend(), LAYOUT, kv_tokens=room, step_tokens=step)
        for i, (features, target) in enumerate(reader.read(texts)):
            kept = found.read(i)
            assert torch.allclose(features.float(), kept.features.float(), **CLOSE)
            assert torch.allclose(target.top_p.float(), kept.target.top_p.float(), **CLOSE)
            assert torch.allclose(target.tail, kept.target.tail, atol=1e-4)


def test_given_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    given = [replace(p, answer_ids=text(4 + i, seed=50 + i)) for i, p in enumerate(prompts())]
    some = plan_jobs(given, 100, MIX, balance=False, seed=0)
    writer = ShardWriter(tmp_path, LAYOUT, {"of": "tests"})
    read_given(backend(), LAYOUT, some, writer, together=2)
    check(ShardSet(tmp_path))
    assert held(tmp_path) == {(p.line, 0): [*p.ids, *(p.answer_ids or ())] for p in given}


class Stopped(Exception):
    pass


def test_a_run_that_stops_goes_on_with_the_same_answers(tmp_path: Path) -> None:
    some = jobs(answers=9)
    make(tmp_path / "whole", some)

    def stop_after(answers: int) -> Any:
        def watch(made: Any, _: int) -> None:
            if made.answers >= answers:
                raise Stopped

        return watch

    parts = tmp_path / "parts"
    for answers in (2, 3):
        with pytest.raises(Stopped):
            make(parts, some, watch=stop_after(answers))
    # What a kill leaves of the shard it was writing.
    (parts / ".shard-00099.safetensors.partial").write_bytes(b"half of it")
    make(parts, some)
    assert held(parts) == held(tmp_path / "whole")
    check(ShardSet(parts))
    lines = [(origin.line, origin.sample) for origin in ShardSet(parts).origins]
    assert len(lines) == len(set(lines)) == 9


def test_empty_answers_are_dropped_and_not_asked_for_again(tmp_path: Path) -> None:
    asked = jobs(answers=6)
    first = {p.line: truths(tiny_model("llama"), [p.ids])[0] for p in prompts()}
    ends = int(first[1].logits[-1].argmax())  # what line 1 begins with, if it is greedy
    some = [replace(job, heat=Heat(0.0)) for job in asked]
    writer = ShardWriter(tmp_path, LAYOUT, {"of": "tests"})
    made = generate(
        backend(),
        LAYOUT,
        some,
        writer,
        max_tokens=5,
        config=replace(room_for(some, 5, 2, 0), block_size=4),
        cost=OnlineStepCost(StepCost.from_table({1: 1.0})),
        eos_ids=(ends,),
    )
    empty = {n for n, truth in first.items() if int(truth.logits[-1].argmax()) == ends}
    assert made.dropped == len(empty) > 0
    assert {origin.line for origin in ShardSet(tmp_path).origins} == set(first) - empty
    again = ShardWriter(tmp_path, LAYOUT, {"of": "tests"})
    assert again.done == {job.name for job in some}


def test_an_answer_ends_where_the_context_does(tmp_path: Path) -> None:
    short = TransformersBackend(tiny_model("llama", max_position_embeddings=24), block_size=4)
    some = plan_jobs(
        [Prompt(1, text(20)), Prompt(2, text(9))], 2, (Heat(0),), balance=False, seed=0
    )
    writer = ShardWriter(tmp_path, LAYOUT, {})
    generate(
        short,
        LAYOUT,
        some,
        writer,
        max_tokens=12,
        config=replace(room_for(some, 12, 2, 0), block_size=4),
        cost=OnlineStepCost(StepCost.from_table({1: 1.0})),
        eos_ids=(),
    )
    lengths = {o.line: n for o, n in zip(*_origins_and_lengths(tmp_path), strict=True)}
    assert lengths == {1: (20, 4), 2: (9, 12)}


def _origins_and_lengths(folder: Path) -> tuple[Any, Any]:
    found = ShardSet(folder)
    return found.origins, found.lengths


def test_too_little_room_for_all_at_once_is_refused(tmp_path: Path) -> None:
    """A preempted answer would lose rows."""
    config = EngineConfig(kv_tokens=64, block_size=4, max_sequences=3)
    with pytest.raises(ConfigError, match=r"kv_tokens: 64 for 3 sequences.*fewer at once"):
        make(tmp_path, jobs(), config=config)


def test_rows_that_are_gone_are_not_made_up() -> None:
    recorder = RecordingBackend(backend(), LAYOUT)
    recorder.allocate(8)
    recorder._blocks_of = {("a", 0): [0, 1]}
    with pytest.raises(LookupError):
        recorder.take(("a", 0), [1, 2, 3], 1)


def test_other_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    make(tmp_path, jobs(answers=2))
    with pytest.raises(DataError, match="of = 'tests', now it is 'others'"):
        ShardWriter(tmp_path, LAYOUT, {"of": "others"})
    with pytest.raises(DataError, match="layout"):
        ShardWriter(tmp_path, replace(LAYOUT, top_k=8), {"of": "tests"})


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    make(tmp_path, jobs(answers=3))
    first = min(tmp_path.glob("shard-*"))
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{first.name}: is damaged or cut short"):
        ShardSet(tmp_path)


@contextmanager
def room_on_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: what a full disk says, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    some = jobs(answers=4)
    with room_on_disk(4096), pytest.raises(DataError, match="the disk is full"):
        make(tmp_path, some)
    assert not list(tmp_path.glob("*shard*"))
    make(tmp_path, some)
    assert len(held(tmp_path)) == 4


def test_a_hidden_state_that_does_not_fit_float16_is_told(tmp_path: Path) -> None:
    found = make(tmp_path / "made", jobs(answers=1))
    large = replace(found.read(0), features=torch.full_like(found.read(0).features, torch.inf))
    writer = ShardWriter(tmp_path / "other", LAYOUT, {})
    writer.add(large)
    with pytest.raises(DataError, match="use bfloat16"):
        writer.flush()


def test_a_process_that_is_killed_loses_the_shard_it_was_filling(tmp_path: Path) -> None:
    """The command itself, by SIGKILL as soon as a shard is there."""
    model = make_checkpoint(tmp_path / "model")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"the cat {i}"}) + "\n" for i in range(24)))
    data = tmp_path / "data"
    command = [
        "data", "generate", str(lines), "--output", str(data), "--model", str(model),
        "--max-tokens", "16", "--shard-tokens", "100", "--concurrency", "2", "--layers", "0",
        "--top-k", "8",
    ]  # fmt: skip
    running = subprocess.Popen([DSPARK, *command], stderr=subprocess.DEVNULL)
    while not list(data.glob("shard-*")):
        assert running.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    running.kill()
    running.wait()
    kept = held(data)
    assert 0 < len(kept) < 24
    assert main(command) == 0
    whole = held(data)
    assert len(whole) == 24
    assert {name: whole[name] for name in kept} == kept
    assert not [name for name in os.listdir(data) if name.startswith(".")]


def test_the_vocabulary_is_that_of_the_tiny_model() -> None:
    assert backend().vocab_size == VOCABULARY
