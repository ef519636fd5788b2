"""From committed ids to the text a client may see, never taking a character back.

A detokenizer holds what later ids could still change, stop strings hold what could become one, and
a `TextStream` is both. The `DecodeStream` of tokenizers 0.23 is not used: of 3,000 random sequences
with byte fallback it raised on 499 and showed characters in 900 that the whole decoding has not; it
has no flush; and it reads all it holds again at each id (4,000 lone lead bytes: 2.9 s, here 7 ms).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"

# Longest run of byte tokens that is looked into for a stop string before it ends (16 emoji).
# Looking costs time in proportion to the run at each of its ids.
PROBED_RUN = 64


class Detokenizer(Protocol):
    """The pieces of `push` and a last `flush` join to the decoding of all ids at once."""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        ...

    def tail(self) -> str:
        """The text that held ids would add if no other came; "" while that has an incomplete
        character in it or is too long to read at each id."""
        ...

    def flush(self) -> str:
        """What is still held, as it reads when no other id comes."""
        ...


class ByteDetokenizer:
    """Byte-level BPE: ids are bytes, and only an incomplete UTF-8 character is held."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def tail(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """Pieces of text, as sentencepiece makes them, with single bytes as a last resort.

    A run of byte tokens is decoded as a whole, so one bad byte at its end turns every character of
    it into U+FFFD: a run is held until an ordinary id ends it.
    decode: ids to text. settles: whether an id is an ordinary piece (not a byte, not skipped).
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], settles: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._settles = settles
        # The last settled id: what follows reads as it would after the whole text, where only the
        # first piece loses its leading space.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        if not self._settles(token):
            return ""
        text = self._held_text()
        self._context, self._held = [token], []
        return text

    def tail(self) -> str:
        text = self._held_text() if len(self._held) <= PROBED_RUN else ""
        return "" if REPLACEMENT in text else text

    def flush(self) -> str:
        return self._held_text()

    def _held_text(self) -> str:
        if not self._held:
            return ""
        known = len(self._decode(self._context))
        return self._decode(self._context + self._held)[known:]


class StopStrings:
    """Cuts a text before the first stop string to be completed (the longest of several at once).

    One Knuth-Morris-Pratt automaton a stop string, so the work is linear in the text. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text that is certain to be shown, whether a stop string ended it).

        armed: whether a stop string completed in `text` counts; it may have begun earlier.
        """
        text, seen = self._held + text, len(self._held)
        for end in range(seen, len(text)):
            stop_length = self._advance(text[end])
            if stop_length and armed:
                self._held = ""
                return text[: end + 1 - stop_length], True
        shown = len(text) - max(self._matched, default=0)
        self._held = text[shown:]
        return text[:shown], False

    def completes(self, text: str) -> bool:
        """Whether `text`, if it came next, would complete a stop string."""
        matched = self._matched.copy()
        found = any(self._advance(char) for char in text)
        self._matched = matched
        return found

    def flush(self) -> str:
        """What was held; no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Take in one character; the length of the longest stop string it completes, or 0."""
        longest = 0
        for i, (stop, fallback) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = fallback[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                longest = max(longest, matched)
                matched = fallback[matched - 1]
            self._matched[i] = matched
        return longest


def borders(stop: str) -> list[int]:
    """[i]: length of the longest proper prefix of stop[:i + 1] that is also its suffix."""
    found = [0]
    for char in stop[1:]:
        length = found[-1]
        while length and stop[length] != char:
            length = found[length - 1]
        found.append(length + (stop[length] == char))
    return found


@dataclass(frozen=True, slots=True)
class TextPiece:
    """text: to be shown next. tokens: ids the whole answer counts so far. stopped: by a string."""

    text: str
    tokens: int
    stopped: bool


class TextStream:
    """One answer's ids in, its text out, ended by the first stop string.

    min_tokens: a stop string is ignored unless it is completed when that many ids are out. It is
    completed by the first id after which the answer, if it ended there, would hold it (in a run of
    byte tokens longer than PROBED_RUN, by the id that ends the run). Ids after that one are neither
    shown nor counted.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._watching = bool(stops)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._stopped = False

    def push(self, ids: Iterable[int]) -> TextPiece:
        shown: list[str] = []
        for token in ids:
            if self._stopped:
                break
            self._tokens += 1
            shown.append(self._take(self._detokenizer.push(token)))
            if self._armed and self._stops.completes(self._detokenizer.tail()):
                shown.append(self._take(self._detokenizer.flush()))
        return self._piece("".join(shown))

    def finish(self) -> TextPiece:
        """The last piece, when no other id comes."""
        shown = ""
        if not self._stopped:
            shown = self._take(self._detokenizer.flush())
        if not self._stopped:
            shown += self._stops.flush()
        return self._piece(shown)

    @property
    def _armed(self) -> bool:
        return self._watching and not self._stopped and self._tokens >= self._min_tokens

    def _take(self, text: str) -> str:
        shown, self._stopped = self._stops.push(text, armed=self._armed)
        return shown

    def _piece(self, text: str) -> TextPiece:
        return TextPiece(text, self._tokens, self._stopped)
