"""What cannot be done is told in one line that names the field, the value and the limit: exit
status 2 for what the user wrote, 1 for a model that cannot be served; never a traceback, nothing on
stdout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import CONTEXT, Ran

Run = Callable[..., Ran]


def refused(ran: Ran, status: int, *words: str) -> None:
    assert (ran.status, ran.out) == (status, ""), ran.err
    (line,) = [line for line in ran.err.splitlines() if not line.startswith("measuring")]
    assert line.startswith("dspark: ")
    for word in words:
        assert word in line


# --- seen before a model is loaded: none of these even has one -----------------------------------

EARLY = [
    (("--temperature", "-1"), "temperature: -1.0 must be a number in [0, 100]"),
    (("--temperature", "nan"), "temperature: nan must be a number in [0, 100]"),
    (("--temperature", "inf"), "temperature: inf must be a number in [0, 100]"),
    (("--top-p", "0"), "top_p: 0.0 must be in (0, 1]"),
    (("--top-p", "1.5"), "top_p: 1.5 must be a number in [0, 1]"),
    (("--top-k", "-2"), "top_k: -2 must be in [-1, 2^31)"),
    (("--min-p", "2"), "min_p: 2.0 must be a number in [0, 1]"),
    (("--presence-penalty", "3"), "presence_penalty: 3.0 must be a number in [-2, 2]"),
    (("--frequency-penalty", "-3"), "frequency_penalty: -3.0 must be a number in [-2, 2]"),
    (("--repetition-penalty", "0"), "repetition_penalty: 0.0 must be above 0"),
    (("--n", "0"), "n: 0 must be in [1, 64]"),
    (("--n", "100"), "n: 100 must be in [1, 64]"),
    (("--max-tokens", "0"), "max_tokens: 0 must be at least 1"),
    (("--min-tokens", "-1"), "min_tokens: -1 must be at least 0"),
    (("--min-tokens", "9", "--max-tokens", "8"), "min_tokens: 9 must be at least 0 and at most"),
    (("--seed", str(2**64)), f"seed: {2**64} must fit in 64 bits"),
    (("--stop", ""), "stop: '' must not be an empty string"),
    (("--top-logprobs", "21"), "top_logprobs: 21 must be in [0, 20]"),
    (("--logit-bias", "nonsense"), "logit_bias: 'nonsense' is not JSON"),
    (("--logit-bias", "[1]"), "logit_bias: '[1]' must be a JSON object of token id to number"),
    (("--logit-bias", '{"a": 1}'), "must be a JSON object of token id to number"),
    (("--logit-bias", '{"1": null}'), "must be a JSON object of token id to number"),
    (("--drafter", "dspork"), "drafter: 'dspork' is not one of: auto, ngram, none"),
    (("--verify", "fixed:0"), "verify: 'fixed:0' must be early-stop, top-k, fixed:N"),
    (("--verify", "threshold:2"), "threshold:X (X in [0, 1])"),
    (("--gamma", "-1"), "gamma: -1 must be in [0, "),
    (("--gamma", "1000"), "gamma: 1000 must be in [0, "),
    (("--dtype", "int4"), "dtype: 'int4' is not one of: float32, bfloat16, int8"),
    (("--backend", "transformers", "--dtype", "int8"), "the transformers backend has no int8"),
    (("--dtype", "int8", "--device", "cuda"), "device: the int8 precision runs on cpu"),
    (("--backend", "vllm"), "backend: 'vllm' is not one of: auto, native, transformers"),
    (("--backend", "native", "--device", "cuda"), "device: the native backend runs on cpu"),
    (("--device", "tpu"), "device: 'tpu' is not one of: cpu, cuda, cuda:N"),
    (("--threads", "-1"), "threads: -1 must be in [0, "),
    (("--kv-tokens", "0"), "kv_tokens: 0 must be above 0"),
    (("--kv-tokens", "3"), "kv_tokens: 3 is below one block"),
    (("--concurrency", "0"), "concurrency: 0 must be at least 1"),
    (("--max-tokens", "many"), "'--max-tokens': ", "'many'"),
    (("--temperature", "hot"), "'--temperature'", "'hot'"),
    (("--frobnicate",), "--frobnicate"),
    (("--output", "out.jsonl"), "output: 'out.jsonl' needs --input"),
    (("--prompt-ids", "[5]"), "prompt: 'PROMPT and --prompt-ids' is given: give one of"),
    (("--raw", "--system", "be brief"), "system: 'be brief' needs a chat"),
]


@pytest.mark.parametrize(("arguments", "words"), [(a, w) for a, *w in EARLY], ids=str)
def test_a_bad_option(dspark: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    refused(dspark("generate", "hello", "--model", "/no/model", *arguments), 2, *words)


BAD_PROMPTS = [
    ((), b"", "prompt: 'nothing' is given: give one of PROMPT, --prompt-ids, --input"),
    (("",), b"", "prompt: '' is empty"),
    (("-",), b"", "prompt: '' is empty"),
    (("-",), b"\xff", "prompt: '-' is not UTF-8"),
    (("--prompt-ids", "nonsense"), b"", "prompt_ids: 'nonsense' is not JSON"),
    (("--prompt-ids", "[1.5]"), b"", "prompt_ids: [1.5] must be a list of token ids"),
    (("--prompt-ids", "[true]"), b"", "prompt_ids: [True] must be a list of token ids"),
    (("--prompt-ids", "[5]", "--system", "a"), b"", "system: 'a' needs a chat"),
    (("--input", "/no/file"), b"", "input: '/no/file' cannot be read: No such file"),
    (("--input", "/"), b"", "input: '/' cannot be read: Is a directory"),
]


@pytest.mark.parametrize(("arguments", "stdin", "words"), BAD_PROMPTS, ids=str)
def test_no_prompt(dspark: Run, arguments: tuple[str, ...], stdin: bytes, words: str) -> None:
    refused(dspark("generate", "--model", "/no/model", *arguments, stdin=stdin), 2, words)


@pytest.mark.parametrize("place", ["", "no/such/place"])
def test_an_output_that_cannot_be_written(dspark: Run, tmp_path: Path, place: str) -> None:
    asked = ("--model", "/no/model", "--input", "-", "--output", tmp_path / place)
    refused(dspark("generate", *asked), 2, f"output: '{tmp_path / place}' cannot be written: ")


def test_an_output_that_fills_up(generate: Run) -> None:
    line = b'{"prompt_ids": [5]}'
    ran = generate("--input", "-", "--output", "/dev/full", "--max-tokens", 1, stdin=line)
    refused(ran, 2, "output: '/dev/full' cannot be written: No space left on device")


def test_an_unknown_command(dspark: Run) -> None:
    refused(dspark("genarate"), 2, "No such command 'genarate'")


def test_other_commands_check_before_they_load_too(dspark: Run) -> None:
    chat = dspark("chat", "--model", "/no/model", "--top-p", 0)
    refused(chat, 2, "top_p: 0.0 must be in (0, 1]")
    profile = dspark("profile", "--model", "/no/model", "--dtype", "int4")
    refused(profile, 2, "dtype: 'int4' is not one of")


def test_a_refusal_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from dspark.cli.main import main; "
        "status = main(['generate', 'a', '--verify', 'nonsense']); "
        "print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


# --- seen when the model's vocabulary and context are known --------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--logit-bias", '{"100000": 1}'), "logit_bias: 100000 is not a token id of the voca"),
        (("--logit-bias", '{"-1": 1}'), "logit_bias: -1 is not a token id of the vocabulary [0, "),
        (("--logit-bias", '{"5": 101}'), "logit_bias[5]: 101.0 must be a number in [-100, 100]"),
        (("--logit-bias", '{"5": NaN}'), "logit_bias[5]: nan must be a number in [-100, 100]"),
        (("--stop-id", "100000"), "stop_ids: 100000 is not a token id of the vocabulary [0, "),
        (
            ("--max-tokens", str(CONTEXT)),
            f"max_tokens: {CONTEXT} is above the room left: {CONTEXT}",
        ),
        (("--min-tokens", str(CONTEXT)), f"min_tokens: {CONTEXT} is above the room left: "),
        (("--top-k", "1000000", "--max-tokens", "0"), "max_tokens: 0"),
    ],
    ids=str,
)
def test_what_the_model_has_no_room_for(
    generate: Run, arguments: tuple[str, ...], words: str
) -> None:
    refused(generate("the cat", *arguments), 2, words)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_fills_the_context(generate: Run, length: int) -> None:
    ran = generate("--prompt-ids", json.dumps([5] * length))
    refused(ran, 2, f"prompt: '{length} tokens' leaves no room", f"at most {CONTEXT} tokens")


def test_a_prompt_that_leaves_room_for_one_token(generate: Run) -> None:
    ids = json.dumps([5] * (CONTEXT - 1))
    answer = generate("--prompt-ids", ids, "--json").answer
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (1, "length")


def test_a_top_k_beyond_the_vocabulary_is_all_of_it(generate: Run) -> None:
    asked = ("the cat", "--json", "--temperature", 1, "--seed", 3, "--max-tokens", 20)
    everything = generate(*asked, "--top-k", 10**6).answer["token_ids"]
    assert everything == generate(*asked).answer["token_ids"]


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "chat", "profile"])
def test_a_model_that_is_none(dspark: Run, command: str, tmp_path: Path) -> None:
    def told(model: object, words: str) -> None:
        prompt = ["hello"] if command == "generate" else []
        refused(dspark(command, *prompt, "--model", model), 1, words)

    told("smollm3", "'smollm3': no such model, directory or file (did you mean 'smollm2-135m'?)")
    told(tmp_path / "gone", "gone: no such file or directory")
    (tmp_path / "fake.gguf").write_bytes(b"no model at all")
    told(tmp_path / "fake.gguf", "fake.gguf: is not a GGUF file (it starts with b'no m')")
    (tmp_path / "empty").mkdir()
    told(tmp_path / "empty", "empty: has no config.json")


def test_a_checkpoint_that_cannot_be_served(dspark: Run, checkpoint: Path, tmp_path: Path) -> None:
    def told(words: str) -> None:
        refused(dspark("generate", "hello", "--model", copy), 1, words)

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    told("model type 'mamba' is not served; these are: llama, ")
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").unlink()
    told("copy: has no weights: neither model.safetensors nor")
