"""A gateway with its gRPC server over a toy engine and a tiny tokenizer: every part is real."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark.core.requests import Event, Request
from dspark.gateway import Tokenizer
from dspark.gateway.answers import Target
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing
from dspark.gateway.servicer import GenerationServicer
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.serving import GrpcServer, TlsFiles, serve_grpc
from dspark.verifier.engine import Engine
from dspark.verifier.runner import EngineRunner

from ..verifier.toy import (
    Rule,
    ScriptedDrafter,
    ToyBackend,
    history_rule,
    oracle,
    target_only,
    toy_engine,
)

SAMPLES = (
    "Hello, world! emoji 😀 👩‍👩‍👧‍👦",
    "日本語と中文,한국어 ﷽",
    "cafe\u0301 n\u0303 Z\u0361a\u0338",
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ROOM = 32_768
# Seconds of work: only a request that is ended from outside asks for so many tokens.
FOR_EVER = 20_000


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, with all bytes and few merges: most answers are full of split characters."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        show_progress=False,
    )
    made.train_from_iterator(SAMPLES * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    wrapped.chat_template = TEMPLATE
    return Tokenizer(wrapped)


VOCAB = tokenizer().vocab_size
RULE = history_rule(VOCAB, seed=3)


def expected(
    prompt: str | tuple[int, ...], tokens: int, rule: Rule = RULE, **rest: Any
) -> list[int]:
    """What the target alone says."""
    ids = tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return target_only(rule, ids, tokens, **rest)


class HeldBackend(ToyBackend):
    """Waits before its forward number `hold_at` until it is let go."""

    def __init__(self, hold_at: int) -> None:
        super().__init__(RULE, VOCAB, context_length=ROOM)
        self.go_on = threading.Event()
        self._hold_at = hold_at

    def forward(self, batch: RaggedBatch) -> StepOutput:
        if self.forwards + 1 == self._hold_at:
            self.go_on.wait()
        return super().forward(batch)


def toy(backend: ToyBackend | None = None, clock: Any = None, **config: Any) -> Engine:
    """Drafts that are right but for every fourth token, so that rounds differ in length."""
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=4))
    backend = backend or ToyBackend(RULE, VOCAB, context_length=ROOM)
    return toy_engine(backend, drafter, kv_tokens=ROOM, clock=clock, **config)


@dataclass
class Recorder:
    """Keeps what a target was asked to run."""

    target: Target
    asked: list[Request] = field(default_factory=list)

    def run(self, request: Request) -> AsyncGenerator[Event, None]:
        self.asked.append(request)
        return self.target.run(request)


@dataclass
class Front:
    gateway: Gateway
    engine: Engine
    asked: list[Request]
    server: GrpcServer

    @property
    def address(self) -> str:
        return self.server.address

    async def freed(self) -> None:
        """Wait until the engine has nothing left; a test's own timeout says that it never has."""
        while not self.engine.idle or self.engine.cache.pool.owned:
            await asyncio.sleep(0.001)
        self.engine.check_integrity()


@asynccontextmanager
async def front(
    engine: Engine | None = None,
    keys: KeyRing | None = None,
    *,
    port: int = 0,
    tls: TlsFiles | None = None,
    drain_s: float = 0.0,
    stall_timeout_s: float | None = None,
    **model: Any,
) -> AsyncIterator[Front]:
    engine = engine or toy()
    async with EngineRunner(engine) as runner:
        cards = tuple(drafter.card for drafter in engine.drafters.values())
        served = ServedModel("toy", "toy", engine.limits, cards, 7, **model)
        target = Recorder(runner)
        gateway = Gateway(
            target, tokenizer(), served, engine.clock, stall_timeout_s=stall_timeout_s
        )
        servicer = GenerationServicer(gateway, keys or KeyRing())
        async with serve_grpc(servicer, port=port, tls=tls, drain_s=drain_s) as server:
            yield Front(gateway, engine, target.asked, server)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="needs ::1, which this machine has not")
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make a certificate"
)


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Self-signed, for localhost."""
    key, file = directory / f"{name}.key", directory / f"{name}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", file),
        ],
        check=True,
        capture_output=True,
    )
    return file, key
