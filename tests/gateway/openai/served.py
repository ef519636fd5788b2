"""The whole HTTP front in a thread of its own: uvicorn on port 0, a gateway, an engine on a toy
target, a tiny tokenizer with a chat template. Every part is real but the model."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import httpx
import numpy as np
import openai
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark.gateway.answers import Target
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing
from dspark.gateway.metrics import Metrics
from dspark.gateway.openai import Door, HttpConfig, HttpServer, make_app, serve_http
from dspark.gateway.tokenizer import Tokenizer
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.serving import TlsFiles
from dspark.telemetry.readings import read_engine
from dspark.verifier.engine import Engine
from dspark.verifier.runner import EngineRunner

from ...verifier.toy import (
    Array,
    Rule,
    ScriptedDrafter,
    ToyBackend,
    history_rule,
    oracle,
    toy_engine,
)

# What the target goes round saying, from wherever in it the prompt leaves it.
SAID = (
    "Hello, world! 😀 👩‍👩‍👧‍👦 🇫🇷 日本語と中文, 한국어. ﷽ cafe\u0301 n\u0303 Z\u0361a\u0338\u2028"
    "<stop> the end\n\nof 'it' \u0085and\tagain; "
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
ROOM = 32_768
# Only a request that is ended from outside asks for so many tokens.
FOR_EVER = 20_000


@cache
def tokenizer() -> Tokenizer:
    """Byte-level with few merges: most characters that are not ASCII come in pieces."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        show_progress=False,
    )
    made.train_from_iterator([SAID] * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    wrapped.chat_template = TEMPLATE
    return Tokenizer(wrapped)


VOCAB = tokenizer().vocab_size
SCRIPT = np.array(tokenizer().encode(SAID), np.int32)


def saying(weight: float = 30.0) -> Rule:
    """The next token is SAID's at this place, with so much more weight than what the history says:
    30 leaves no choice, 8 strays now and then at temperature 1."""
    strays = history_rule(VOCAB, seed=5, spread=2.0)

    def rule(history: Array, first: int) -> Array:
        logits = strays(history, first).copy()
        places = np.arange(first, len(history))
        logits[places - first, SCRIPT[places % len(SCRIPT)]] += weight
        logits[:, 0] = -50.0  # no </s>, unless a bias wants it
        return logits

    return rule


class HeldBackend(ToyBackend):
    """Waits before each forward from number `hold_at` on until it is let go."""

    def __init__(self, rule: Rule, hold_at: int) -> None:
        super().__init__(rule, VOCAB, context_length=ROOM)
        self.go_on = threading.Event()
        self._hold_at = hold_at

    def forward(self, batch: RaggedBatch) -> StepOutput:
        if self.forwards + 1 >= self._hold_at:
            self.go_on.wait(30)
        return super().forward(batch)


def said(prompt: str | tuple[int, ...], tokens: int) -> str:
    """What a target that has no choice answers."""
    begin = len(prompt if isinstance(prompt, tuple) else tokenizer().encode(prompt)) - 1
    places = np.arange(begin, begin + tokens) % len(SCRIPT)
    return tokenizer().decode(SCRIPT[places].tolist())


def toy(
    rule: Rule | None = None,
    backend: ToyBackend | None = None,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> Engine:
    """Drafts of 7 that are right but for every fifth token, so that rounds differ in length."""
    rule = rule or saying()
    return toy_engine(
        backend or ToyBackend(rule, VOCAB, context_length=ROOM),
        ScriptedDrafter(oracle(rule, wrong_every=5), gamma=7),
        clock=clock,
        eos_ids=tokenizer().eos_ids,
        **{"kv_tokens": ROOM, **config},
    )


@dataclass
class Served:
    """A front that runs. key: that the clients send."""

    engine: Engine
    gateway: Gateway
    door: Door
    server: HttpServer
    key: str
    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        """receive_bytes: that the kernel keeps for a client that does not read."""
        connection = socket.socket()
        connection.settimeout(20)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", self.server.port))
        return connection

    def call(self, action: Callable[[], None]) -> None:
        """Do something in the event loop of the front."""

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self.loop).result(10)

    def wait_active(self, choices: int) -> None:
        """Until so many are in the engine; a test's own timeout says that they never come."""
        while self.engine.active < choices:
            time.sleep(0.001)

    def begin_drain(self) -> None:
        """The context ends by itself once it is drained."""
        self.loop.call_soon_threadsafe(self.stopping.set)

    def wait_freed(self, within_s: float) -> None:
        """Until the engine is at its base: nothing runs, waits or owns a block."""
        end = time.monotonic() + within_s
        while self.engine.active or self.engine.cache.pool.owned:
            assert time.monotonic() < end, f"{self.engine.active} choices run on"
            time.sleep(0.005)


@contextmanager
def serve(
    engine: Engine | None = None,
    *,
    keys: KeyRing | None = None,
    key: str = "any",
    config: HttpConfig | None = None,
    opened: bool = True,
    target: Target | None = None,
    tls: TlsFiles | None = None,
    clock: Callable[[], float] = time.monotonic,
    host: str = "127.0.0.1",
    stall_timeout_s: float | None = None,
    **model: Any,
) -> Iterator[Served]:
    """target: instead of the engine's runner."""
    engine = engine or toy()
    up: list[Served] = []
    started = threading.Event()

    async def run() -> None:
        door = Door()
        bounds = config or HttpConfig(drain_s=0.2)
        cards = tuple(drafter.card for drafter in engine.drafters.values())
        limits = {"limits": engine.limits, "drafters": cards, "gamma": 7}
        async with EngineRunner(engine) as runner:
            served = ServedModel("toy", "toy-target", **{**limits, **model})
            gateway = Gateway(
                target or runner,
                tokenizer(),
                served,
                clock,
                metrics=Metrics(partial(read_engine, engine)),
                stall_timeout_s=stall_timeout_s,
            )
            app = make_app(gateway, keys or KeyRing(), door, bounds)
            async with serve_http(app, door, host, config=bounds, tls=tls) as server:
                if opened:
                    door.open()
                loop = asyncio.get_running_loop()
                up.append(Served(engine, gateway, door, server, key, loop))
                started.set()
                await up[0].stopping.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="front")
    thread.start()
    try:
        assert started.wait(30), "the front did not start"
        yield up[0]
    finally:
        if up:
            up[0].begin_drain()
        thread.join(30)
    assert not thread.is_alive(), "the front did not stop"
    engine.check_integrity()
