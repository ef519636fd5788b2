"""From a target's events to pieces of text and one whole answer. The target is scripted; ids are
bytes, so that a test can read them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from dspark.core.errors import DsparkError, InvalidRequest, Unavailable
from dspark.core.requests import (
    Committed,
    Event,
    Finished,
    FinishReason,
    Request,
    SpeculationFigures,
    TokenLogprob,
    Usage,
)
from dspark.core.sampling import SamplingParams
from dspark.gateway.answers import Answer, Piece, stream_answer, whole_answer
from dspark.gateway.aside import LONG_PROMPT
from dspark.gateway.text import ByteDetokenizer, Detokenizer

PROMPT = (1, 2, 3)
LENGTH = Finished(FinishReason.LENGTH, Usage(3, 0))


class Bytes:
    """A tokenizer whose ids are bytes."""

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(lambda token: bytes([token]))


@dataclass
class ScriptedTarget:
    """Says its events, one second of `clock` apart, then raises or waits for ever if told to."""

    events: Sequence[Event]
    raises: DsparkError | None = None
    waits: bool = False
    now: float = 0.0
    closed: bool = False
    said: int = 0
    reached_end: asyncio.Event = field(default_factory=asyncio.Event)

    def clock(self) -> float:
        return self.now

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        try:
            for event in self.events:
                self.now += 1.0
                self.said += 1
                yield event
            self.reached_end.set()
            if self.raises is not None:
                raise self.raises
            if self.waits:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def commits(*texts: bytes, accepted: int | None = None) -> list[Committed]:
    """One commit a text: a first token, then rounds whose tokens but the last were drafted."""
    made, index = [], 0
    for text in texts:
        logprobs = tuple(TokenLogprob(-float(index + k)) for k in range(len(text)))
        stood = len(text) - 1
        figures = SpeculationFigures(1, 7, 5, stood) if index else SpeculationFigures()
        made.append(Committed(index, tuple(text), logprobs, figures, cached_tokens=2))
        index += len(text)
    return made


def request(**sampling: object) -> Request:
    return Request("a", PROMPT, SamplingParams(**sampling), choice=4)  # type: ignore[arg-type]


async def told(target: ScriptedTarget, asked: Request) -> tuple[list[Piece], Answer]:
    events = [event async for event in stream_answer(target, Bytes(), asked, target.clock)]
    pieces = [event for event in events if isinstance(event, Piece)]
    (answer,) = events[len(pieces) :]
    assert isinstance(answer, Answer), "the answer comes last"
    assert "".join(piece.text for piece in pieces) == answer.text
    assert tuple(token for piece in pieces for token in piece.ids) == answer.token_ids
    assert tuple(entry for piece in pieces for entry in piece.logprobs) == answer.logprobs
    assert target.closed
    return pieces, answer


async def test_pieces_come_as_they_are_committed_and_then_the_whole() -> None:
    target = ScriptedTarget([*commits(b"a", b"bcd", b"ef"), LENGTH])
    pieces, answer = await told(target, request())
    assert [piece.text for piece in pieces] == ["a", "bcd", "ef"]
    assert answer.text == "abcdef"
    assert answer.token_ids == tuple(b"abcdef")
    assert [entry.logprob for entry in answer.logprobs] == [0, -1, -2, -3, -4, -5]
    assert answer.choice == 4
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage == Usage(prompt_tokens=3, completion_tokens=6, cached_tokens=2)
    assert answer.speculation == SpeculationFigures(rounds=2, drafted=14, verified=10, accepted=3)


async def test_timing_is_of_tokens_not_of_text() -> None:
    target = ScriptedTarget([*commits(b"\xe2", b"\x82", b"\xac!!"), LENGTH])
    _, answer = await told(target, request())
    timing = answer.timing
    assert (timing.ttft_s, timing.total_s) == (1.0, 4.0)
    assert timing.tpot_s == pytest.approx(2.0 / 4)  # the 4 further tokens came within 2 s


async def test_one_token_has_no_time_between_tokens() -> None:
    _, answer = await told(ScriptedTarget([*commits(b"a"), LENGTH]), request())
    assert (answer.timing.ttft_s, answer.timing.tpot_s) == (1.0, 0.0)


async def test_no_token_at_all_is_an_answer_too() -> None:
    _, answer = await told(ScriptedTarget([LENGTH]), request())
    assert (answer.text, answer.token_ids, answer.usage.completion_tokens) == ("", (), 0)
    assert (answer.timing.ttft_s, answer.timing.tpot_s) == (1.0, 0.0)


async def test_cached_tokens_are_tokens_of_the_prompt() -> None:
    """A replay finds committed ids in the cache as well; they are no part of the prompt."""
    target = ScriptedTarget([Committed(0, (97,), cached_tokens=9), LENGTH])
    _, answer = await told(target, request())
    assert answer.usage.cached_tokens == len(PROMPT)


async def test_text_waits_for_the_rest_of_a_character() -> None:
    target = ScriptedTarget([*commits(b"\xe2", b"\x82", b"\xac"), LENGTH])
    pieces, answer = await told(target, request())
    assert [(piece.text, len(piece.ids)) for piece in pieces] == [("", 1), ("", 1), ("€", 1)]
    assert answer.text == "€"


async def test_a_character_that_stays_incomplete_is_shown_at_the_end() -> None:
    pieces, answer = await told(ScriptedTarget([*commits(b"a\xe2"), LENGTH]), request())
    assert [(piece.text, len(piece.ids)) for piece in pieces] == [("a", 2), ("\ufffd", 0)]
    assert answer.finish_reason is FinishReason.LENGTH


# --- stop strings --------------------------------------------------------------------------------


async def test_a_stop_string_cuts_text_ids_logprobs_usage_and_figures() -> None:
    """It is completed by the second of five tokens; the other three were never said (L6)."""
    target = ScriptedTarget([*commits(b"a", b"bc", b"<>xyz", b"never"), LENGTH])
    pieces, answer = await told(target, request(stop=("<>",), logprobs=True))
    assert answer.text == "abc"
    assert answer.token_ids == tuple(b"abc<>")
    assert [entry.logprob for entry in answer.logprobs] == [0, -1, -2, -3, -4]
    assert answer.usage == Usage(3, 5, 2)
    assert answer.finish_reason is FinishReason.STOP
    # Of the last round 4 drafted tokens stood in the target, 2 of them before the cut.
    assert answer.speculation == SpeculationFigures(rounds=2, drafted=14, verified=10, accepted=3)
    assert pieces[-1].ids == tuple(b"<>")
    assert target.said == 3, "the rest was asked for"


async def test_a_stop_string_may_be_spread_over_commits() -> None:
    target = ScriptedTarget([*commits(b"ab<", b"-", b">cd", b"never"), LENGTH])
    pieces, answer = await told(target, request(stop=("<->",)))
    assert [piece.text for piece in pieces] == ["ab", "", ""]
    assert (answer.text, answer.token_ids) == ("ab", tuple(b"ab<->"))
    assert answer.finish_reason is FinishReason.STOP


async def test_what_might_have_become_a_stop_string_is_shown_at_the_end() -> None:
    target = ScriptedTarget([*commits(b"ab<", b"-"), LENGTH])
    pieces, answer = await told(target, request(stop=("<->",)))
    assert [(piece.text, len(piece.ids)) for piece in pieces] == [("ab", 3), ("", 1), ("<-", 0)]
    assert answer.finish_reason is FinishReason.LENGTH


async def test_a_stop_string_that_only_the_end_completes() -> None:
    target = ScriptedTarget([*commits(b"a\xe2"), LENGTH])
    _, answer = await told(target, request(stop=("\ufffd",)))
    assert (answer.text, answer.finish_reason) == ("a", FinishReason.STOP)


async def test_a_stop_string_before_min_tokens_is_text() -> None:
    target = ScriptedTarget([*commits(b"a.b.", b"c.d"), LENGTH])
    _, answer = await told(target, request(stop=(".",), min_tokens=5))
    assert (answer.text, answer.token_ids) == ("a.b.c", tuple(b"a.b.c."))


# --- answers that began elsewhere ----------------------------------------------------------------


async def test_a_resumed_answer_shows_what_is_new_and_counts_all() -> None:
    """Ids cut a character in two: who holds the first half has not seen it yet."""
    asked = replace(request(), committed_ids=tuple(b"ab\xe2\x82"))
    target = ScriptedTarget([Committed(4, tuple(b"\xac!")), LENGTH])
    events = [event async for event in stream_answer(target, Bytes(), asked, target.clock)]
    *pieces, answer = events
    assert pieces == [Piece("€!", tuple(b"\xac!"))]
    assert isinstance(answer, Answer)
    assert (answer.text, answer.token_ids) == ("ab€!", tuple(b"ab\xe2\x82\xac!"))
    assert answer.usage.completion_tokens == 6


async def test_a_resumed_answer_that_had_ended_runs_nothing() -> None:
    asked = replace(request(stop=("<>",)), committed_ids=tuple(b"ab<>"))
    target = ScriptedTarget([*commits(b"never"), LENGTH])
    answer = await whole_answer(target, Bytes(), asked)
    assert (answer.text, answer.finish_reason) == ("ab", FinishReason.STOP)
    assert target.said == 0


# --- ends that are no answers --------------------------------------------------------------------


async def failed(target: ScriptedTarget) -> list[Piece | Answer | DsparkError]:
    """What a reader saw of a stream that has no answer, the error last."""
    seen: list[Piece | Answer | DsparkError] = []
    try:
        async for event in stream_answer(target, Bytes(), request()):
            seen.append(event)
    except DsparkError as error:
        seen.append(error)
    assert target.closed
    assert not any(isinstance(event, Answer) for event in seen)
    return seen


async def test_a_refusal_is_raised() -> None:
    error = InvalidRequest("n", 0, "must be at least 1")
    assert await failed(ScriptedTarget([], raises=error)) == [error]


async def test_an_error_event_is_raised_after_what_was_said() -> None:
    error = Unavailable("the engine is stopping")
    last = Finished(FinishReason.ERROR, Usage(3, 1), error=error)
    piece, raised = await failed(ScriptedTarget([*commits(b"a"), last]))
    assert isinstance(piece, Piece)
    assert raised is error


@pytest.mark.parametrize("last", [[], [Finished(FinishReason.ERROR, Usage(3, 1))]])
async def test_a_target_that_falls_silent_is_an_error_not_an_answer(last: list[Event]) -> None:
    *_, error = await failed(ScriptedTarget([*commits(b"a"), *last]))
    assert isinstance(error, Unavailable)


async def test_whole_answer_raises_too() -> None:
    with pytest.raises(Unavailable):
        await whole_answer(ScriptedTarget(commits(b"a")), Bytes(), request())


async def test_a_reader_that_is_cancelled_hangs_up_on_the_target() -> None:
    target = ScriptedTarget(commits(b"a"), waits=True)
    reading = asyncio.create_task(whole_answer(target, Bytes(), request()))
    await target.reached_end.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert target.closed


async def test_a_reader_that_leaves_hangs_up_on_the_target() -> None:
    target = ScriptedTarget([*commits(b"a", b"b"), LENGTH])
    async with aclosing(stream_answer(target, Bytes(), request())) as events:
        await anext(events)
        assert not target.closed
    assert (target.closed, target.said) == (True, 1)


async def test_whole_answer_is_the_answer() -> None:
    target = ScriptedTarget([*commits(b"a", b"bc"), LENGTH])
    answer = await whole_answer(target, Bytes(), request())
    assert answer.text == "abc"
    assert target.closed


class Threads(Bytes):
    """Says where it works."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def detokenizer(self) -> Detokenizer:
        def token_bytes(token: int) -> bytes:
            self.seen.add(threading.get_ident())
            return bytes([token])

        return ByteDetokenizer(token_bytes)


@pytest.mark.parametrize(
    ("held", "stops", "aside"),
    [(LONG_PROMPT, 1, False), (LONG_PROMPT + 1, 1, True), (LONG_PROMPT, 2, True)],
)
async def test_much_that_a_reader_holds_is_read_beside_the_event_loop(
    held: int, stops: int, aside: bool
) -> None:
    asked = request(stop=tuple(f"never {i}" for i in range(stops)))
    asked = replace(asked, committed_ids=tuple(b"x" * held))
    where = Threads()
    answer = await whole_answer(ScriptedTarget([LENGTH]), where, asked)
    assert answer.text == "x" * held
    assert (threading.get_ident() not in where.seen) is aside
