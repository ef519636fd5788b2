"""The target writes the user's turn: it goes on after the chat template's opening of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError
from dspark.core.requests import Committed, FinishReason, Request
from dspark.core.sampling import SamplingParams
from dspark.models.targets.backend import Backend
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.training.errors import DataError, writing
from dspark.training.prompts import read_lines
from dspark.verifier.engine import Engine, Key


class Words(Protocol):
    """What is needed of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> tuple[int, ...]: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """prompts: how many lines there should be at the end. system: who the user talks to, None for
    the template's own. opener_words: of an opener, how many a prompt begins with."""

    prompts: int
    domain: str = "chat"
    system: str | None = None
    opener_words: int = 3
    temperature: float = 0.9
    top_p: float = 0.95
    max_tokens: int = 128
    seed: int = 0


@dataclass(slots=True)
class Synthesized:
    kept: int = 0
    thrown: int = 0


# Attempts for each prompt that is wanted before it counts as hopeless.
PATIENCE = 10
SOURCE = "synthesized"


def user_turn(tokenizer: Words, system: str | None) -> tuple[int, ...]:
    """Ids of the template up to where a user's words begin: what any two messages have in common.

    Raises ConfigError for a template that puts nothing before them.
    """
    told = [] if system is None else [{"role": "system", "content": system}]
    one, other = (tokenizer.chat([*told, {"role": "user", "content": word}]) for word in ("A", "("))
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    if not same:
        raise ConfigError("the chat template has nothing before a user's words to go on from")
    return one[:same]


def synthesize_prompts(
    backend: Backend,
    tokenizer: Words,
    wish: Wish,
    output: Path,
    *,
    openers: Path | None = None,
    concurrency: int = 64,
    watch: Callable[[int, int, str], None] = lambda _done, _all, _note: None,
) -> Synthesized:
    """Append prompt lines to `output` until it has as many as are wished for.

    A last line that a kill cut short is taken away first. Attempt i is a function of the seed and
    i, and lines carry their i, so a run that goes on does not write anything twice.
    Raises DataError, also where too few of the attempts are of use.
    """
    head = user_turn(tokenizer, wish.system)
    starts = [""] if openers is None else _openers(openers, wish.opener_words)
    begins = {start: (*head, *_inside(tokenizer, start)) for start in starts}
    known, attempt = _held(output)
    result = Synthesized(kept=len(known))
    longest = max(map(len, begins.values())) + wish.max_tokens
    engine = _engine(backend, tokenizer, concurrency, longest)
    begun: dict[Key, tuple[str, list[int]]] = {}
    last = attempt + PATIENCE * max(wish.prompts - len(known), 0)
    with writing(output), output.open("a", encoding="utf-8") as file:
        while len(known) < wish.prompts:
            while len(begun) < concurrency and attempt < last:
                start = starts[
                    int(np.random.default_rng([wish.seed, attempt]).integers(len(starts)))
                ]
                request = _request(attempt, begins[start], wish)
                engine.submit(request)
                begun[request.request_id, 0] = start, []
                attempt += 1
            if not begun:
                raise DataError(
                    f"{output}: {result.kept} prompts of {wish.prompts}: {PATIENCE} attempts for "
                    "each were not enough; use openers, a higher temperature or another system text"
                )
            for key, event in engine.step():
                if isinstance(event, Committed):
                    begun[key][1].extend(event.ids)
                    continue
                start, ids = begun.pop(key)
                text = (start + tokenizer.decode(ids)).strip()
                if event.reason is not FinishReason.STOP or not text or text in known:
                    result.thrown += 1
                elif len(known) < wish.prompts:
                    known.add(text)
                    result.kept += 1
                    line = {"domain": wish.domain, "source": SOURCE, "prompt": text}
                    file.write(json.dumps({**line, "attempt": int(key[0])}) + "\n")
                    file.flush()
            watch(len(known), wish.prompts, "")
    return result


def _engine(backend: Backend, tokenizer: Words, concurrency: int, longest: int) -> Engine:
    config = EngineConfig(
        kv_tokens=concurrency * (longest + 32),
        max_sequences=concurrency,
        max_step_tokens=max(512, concurrency),
        max_waiting=concurrency,
        verify="none",
    )
    cost = OnlineStepCost(StepCost.from_table({1: 1.0}))  # there is nothing to plan
    return Engine(backend, config, cost, eos_ids=tokenizer.eos_ids)


def _inside(tokenizer: Words, text: str) -> tuple[int, ...]:
    """Ids of a text that goes on a prompt: without what is put around any (BOS, EOS)."""
    ids, around = tokenizer.encode(text), tokenizer.encode("")
    for before in range(len(around) + 1):
        inside = ids[before : before + len(ids) - len(around)]
        if (*around[:before], *inside, *around[before:]) == ids:
            return inside
    return ids


def _request(attempt: int, ids: tuple[int, ...], wish: Wish) -> Request:
    params = SamplingParams(
        temperature=wish.temperature,
        top_p=wish.top_p,
        seed=(wish.seed << 32) + attempt,
        max_tokens=wish.max_tokens,
    )
    return Request(str(attempt), ids, params)


def _held(output: Path) -> tuple[set[str], int]:
    """The prompts that are there, and the first attempt that was not begun then."""
    if not output.exists():
        return set(), 0
    with writing(output):
        data = output.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with output.open("r+b") as file:
                file.truncate(len(whole))
    known, attempt = set(), 0
    for number, line in read_lines(output):
        try:
            facts = json.loads(line)
            known.add(str(facts["prompt"]))
            attempt = max(attempt, int(facts["attempt"]) + 1)
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"{output}: line {number} is not one of `dspark data synthesize`; give another file"
            ) from error
    return known, attempt


def _openers(path: Path, words: int) -> list[str]:
    """The first words of each prompt."""
    found = []
    for number, line in read_lines(path):
        try:
            first = str(json.loads(line)["prompt"]).split()[:words]
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(f"{path}: line {number} has no prompt to open with") from error
        if first:
            found.append(" ".join(first))
    if not found:
        raise DataError(f"{path}: has no prompt to open with")
    return found
