"""A checkpoint small enough to answer in a blink, and the `dspark` command to ask it.

`dspark(...)` is the command's own entry point in this process; `DSPARK` is the installed script.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from dspark.cli.main import main

DSPARK = Path(sys.executable).parent / "dspark"
CONTEXT = 4096
CORPUS = ["the cat sat on the mat and the dog sat on the log", "one two three four five six"] * 20
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Ran:
    """What a command said and how it ended."""

    status: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """Of a command that went well: the object it printed, alone on stdout."""
        assert self.status == 0, self.err
        value: dict[str, Any] = json.loads(self.out)
        return value

    @property
    def lines(self) -> list[dict[str, Any]]:
        assert self.status == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def make_checkpoint(directory: Path) -> Path:
    """A random Llama, always the same, with logits far apart. It never ends by itself, and as its
    attention is weak it soon says what it said before: something for prompt lookup to find."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    noise = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 0.03 if "o_proj" in name else 0.15
            parameter.data = scale * torch.randn(parameter.shape, generator=noise)
    model.lm_head.weight.data[:2] = 0.0  # the special ids
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests, so that a step's cost is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(shared_cache))
    return shared_cache


@pytest.fixture
def dspark(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """Run a command; `stdin` is what is piped into it."""

    def run(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def generate(dspark: Callable[..., Ran], checkpoint: Path) -> Callable[..., Ran]:
    """`dspark generate` on the tiny model."""
    return lambda *arguments, stdin=b"": dspark(
        "generate", "--model", checkpoint, *arguments, stdin=stdin
    )


@pytest.fixture
def start(cache: Path, checkpoint: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """The installed script on the tiny model, as a process of its own."""

    def run(
        command: str, *arguments: object, cache: Path = cache, **options: Any
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [DSPARK, command, "--model", checkpoint, *map(str, arguments)],
            env={**os.environ, "DSPARK_CACHE": str(cache)},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    return run
