"""From prompts to a calibrated drafter and its figures by commands alone; what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.core.sampling import SamplingMode
from dspark.models.drafters.calibration_file import read_calibration
from dspark.training.shards import ShardSet

from ..cli.conftest import Ran
from ..models.drafters.traces import GOLDEN, TOKENS, traces

Dspark = Callable[..., Ran]

WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "and",
    "log",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
]
CONFIG = """
target = "{target}"
[drafter]
gamma = 3
layers = 1
rank = 8
draft_vocab = 120
[data]
folders = ["{data}"]
held_out = 0.4
[training]
steps = 6
sequences = 4
anchors = 6
[run]
folder = "{run}"
log_steps = 2
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        {"prompt": f"{a} {b}", "domain": "math" if a < b else "chat"}
        for a in WORDS[:5]
        for b in WORDS[5:9]
    ]
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def generate(dspark: Dspark, checkpoint: Path, prompts: Path) -> Callable[..., Ran]:
    def run(output: Path, *options: object, of: Path = prompts) -> Ran:
        return dspark(
            "data", "generate", of, "--output", output, "--model", checkpoint,
            "--max-tokens", 12, "--concurrency", 4, "--layers", "-1,0", "--top-k", 8, *options,
        )  # fmt: skip

    return run


def test_from_prompts_to_figures(
    dspark: Dspark,
    checkpoint: Path,
    prompts: Path,
    generate: Callable[..., Ran],
    tmp_path: Path,
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    made = generate(data, "--answers", 16, "--balance")
    assert made.status == 0, made.err
    assert "bytes a token" in made.err
    assert len(ShardSet(data)) == 16
    again = generate(data, "--answers", 20, "--balance")
    assert "16 of 20 answers are there already" in again.err
    assert len(ShardSet(data)) == 20

    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(target=checkpoint, data=data, run=run))
    part = dspark("train", "--config", config, "--stop-at", 3)
    assert part.status == 0, part.err
    done = dspark("train", "--config", config)
    assert done.status == 0, done.err
    assert "6 steps done" in done.err
    assert "greedy tau" in done.err
    drafter = run / "state-00000006" / "drafter"

    result, figure = tmp_path / "calibration.json", tmp_path / "reliability.png"
    calibrated = dspark(
        "calibrate", "--drafter", drafter, "--target", checkpoint, "--rounds", 60,
        "--max-tokens", 12, "--output", result, "--figure", figure,
    )  # fmt: skip
    assert calibrated.status == 0, calibrated.err
    judged = json.loads(result.read_text())
    assert [one["mode"] for one in judged["modes"]] == ["greedy", "rejection", "coupled"]
    tables = read_calibration(drafter, judged["drafter"])
    assert {table.mode for table in tables} == set(SamplingMode)
    assert figure.stat().st_size > 1000

    same, half = tmp_path / "same", tmp_path / "half"
    export = ["drafter", "export", "--drafter", drafter, "--target", checkpoint, "--output"]
    assert dspark(*export, same).status == 0
    assert read_calibration(same, judged["drafter"]) == tables
    halved = dspark(*export, half, "--dtype", "bfloat16")
    assert "make it again with `dspark calibrate`" in halved.err
    weights = [folder / "model.safetensors" for folder in (drafter, half)]
    assert weights[1].stat().st_size < 0.6 * weights[0].stat().st_size
    assert "is there already" in dspark(*export, half).err
    public = dspark(*export, tmp_path / "public", "--format", "deepspec")
    assert public.status == 0, public.err

    out, pictures = tmp_path / "eval.json", tmp_path / "figures"
    found = dspark(
        "eval", "--drafter", drafter, "--target", checkpoint, "--prompts", prompts, "--limit", 4,
        "--max-tokens", 12, "--output", out, "--figures", pictures, "--json",
    )  # fmt: skip
    answer = found.answer
    assert json.loads(out.read_text()) == answer
    assert [row["temperature"] for row in answer["temperatures"]] == [0.0, 1.0]
    for row in answer["temperatures"]:
        assert row["all"]["answers"] == 4
        assert 1.0 <= row["all"]["tau"] <= 4.0
    names = {path.name for path in pictures.iterdir()}
    assert "figure2-acceptance-by-position-t0.png" in names
    assert "figure5-thresholds-t1.png" in names

    other = tmp_path / "ngram.json"
    table = dspark(
        "eval", "--drafter", "ngram", "--target", checkpoint, "--prompts", prompts, "--limit", 2,
        "--max-tokens", 12, "--temperatures", "0", "--output", other,
    )  # fmt: skip
    assert table.status == 0, table.err
    assert "acceptance by position" in table.out
    drawn = dspark("eval", "plot", out, other, "--output", pictures, "--baseline", "ngram")
    assert drawn.status == 0, drawn.err
    assert (pictures / "figure4-gain-t0.png").is_file()


def test_sizes_are_stated_and_nothing_is_written(
    generate: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = generate(tmp_path / "data", "--dry-run", "--answers", 10)
    assert ran.status == 0, ran.err
    # Two layers of 64 numbers in two bytes and an id; eight kept ids, probabilities and a rest.
    assert "260 bytes a token and 52 more a token of an answer" in ran.err
    assert not (tmp_path / "data").exists()


def test_broken_lines(generate: Callable[..., Ran], tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "the cat"}\n{"prompt": 1}\n{"prompt": "the dog"}\n')
    refused = generate(tmp_path / "data", of=lines)
    assert refused.status == 1
    assert "line 2: prompt: 1 must be a string" in refused.err
    assert not (tmp_path / "data").exists()
    skipped = generate(tmp_path / "data", "--skip-bad", of=lines)
    assert skipped.status == 0, skipped.err
    assert "left out: line 2" in skipped.err
    assert {origin.line for origin in ShardSet(tmp_path / "data").origins} == {1, 3}


def test_given_answers_are_read(generate: Callable[..., Ran], tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt_ids": [3, 4], "answer_ids": [5, 6, 7]}\n')
    ran = generate(tmp_path / "data", of=lines)
    assert ran.status == 0, ran.err
    assert ShardSet(tmp_path / "data").read(0).token_ids.tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--layers", "1"], r"layers: '1' must lie in [-1, 0]"),
        (["--layers", "a"], "layers: 'a' must be numbers"),
        (["--mix", "hot"], "mix: 'hot' must be"),
        (["--max-tokens", 0], "max_tokens: 0 must be at least 1"),
        (["--feature-dtype", "int8"], "feature_dtype: 'int8'"),
        (["--drafter", "dspark"], "drafter: 'dspark' must be none or ngram"),
    ],
)
def test_what_generate_refuses(
    dspark: Dspark, checkpoint: Path, prompts: Path, tmp_path: Path, options: list[Any], told: str
) -> None:
    ran = dspark("data", "generate", prompts, "--output", tmp_path, "--model", checkpoint, *options)
    assert ran.status == 2
    assert told in ran.err


def test_prompts_are_written_by_the_target(
    dspark: Dspark, checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """The tiny model never ends by itself: no turn is whole."""
    out = tmp_path / "made.jsonl"
    base = ["data", "synthesize", "--output", out, "--model", checkpoint, "--max-tokens", 6]
    hopeless = dspark(*base, "--prompts", 2)
    assert hopeless.status == 1
    assert "10 attempts for each were not enough" in hopeless.err


def test_a_trace_by_the_command(dspark: Dspark) -> None:
    """The golden target has no tokenizer: ids are enough."""
    golden = traces("dspark_markov")[0]
    ran = dspark(
        "eval", "trace", "--target", GOLDEN / "target_qwen3_tiny",
        "--drafter", GOLDEN / "dspark_markov", "--prompt-ids", json.dumps(golden.prompt),
        "--max-tokens", TOKENS, "--dtype", "float32", "--json",
    )  # fmt: skip
    found = ran.answer
    assert found["output"] == list(golden.output)
    assert [one["draft"] for one in found["rounds"]] == [one.draft for one in golden.rounds]


def test_an_exported_checkpoint_drafts_the_same(dspark: Dspark, tmp_path: Path) -> None:
    """From the public format to ours and back."""
    golden = traces("dspark_markov")[0]
    target = GOLDEN / "target_qwen3_tiny"
    place = GOLDEN / "dspark_markov"
    for form in ("dspark", "deepspec"):
        made = dspark(
            "drafter", "export", "--drafter", place, "--target", target,
            "--output", tmp_path / form, "--format", form,
        )  # fmt: skip
        assert made.status == 0, made.err
        place = tmp_path / form
        found = dspark(
            "eval", "trace", "--target", target, "--drafter", place, "--dtype", "float32",
            "--prompt-ids", json.dumps(golden.prompt), "--max-tokens", TOKENS, "--json",
        ).answer  # fmt: skip
        assert [one["draft"] for one in found["rounds"]] == [one.draft for one in golden.rounds]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["eval", "--drafter", "ngram"], "prompts: [] name no *.jsonl file"),
        (["eval", "--prompts", "x.jsonl"], "drafter: '' must be given"),
        (["eval", "--drafter", "d", "--temperatures", "hot"], "temperatures: 'hot'"),
        (["calibrate", "--drafter", "d", "--modes", "warm"], "modes: 'warm' must be of"),
        (["calibrate", "--drafter", "d", "--temperature", "0"], "temperature: 0.0"),
        (["train", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["train", "--config", "nowhere.toml", "--workers", "0"], "workers: 0"),
        (["eval", "trace", "--drafter", "d", "--prompt-ids", "[]"], "prompt_ids: [] is empty"),
    ],
)
def test_what_the_others_refuse(dspark: Dspark, command: list[str], told: str) -> None:
    ran = dspark(*command)
    assert ran.status == 2
    assert told in ran.err
