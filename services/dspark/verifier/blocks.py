"""KV blocks: who owns them, which hold a prefix worth keeping, and which goes next.

A block is free (holds nothing), owned (referenced by sequences) or idle (referenced by nobody, kept
because its tokens may come again). Idle blocks are evicted least recently used first. A block's
contents are named by the digest of all tokens up to its end, so equal prefixes share blocks; where
a prompt leaves a cached block half-way, its part can be copied instead of computed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

ROOT = b""
# Blocks that begin alike and are compared when looking for the longest partial match.
PARTIAL_CANDIDATES = 16


def digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: its tokens and everything before them."""
    data = parent + np.asarray(tokens, dtype=np.int32).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """What a cached block holds. feature_id: context features stored with it, "" = none."""

    parent: bytes
    tokens: tuple[int, ...]
    feature_id: str


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: whole blocks (and their names) to share, `tokens` of `donor` to copy."""

    blocks: tuple[int, ...]
    names: tuple[bytes, ...]
    donor: int | None
    tokens: int


class BlockPool:
    """All KV blocks of one verifier, with its prefix cache."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._entries: dict[int, Entry] = {}
        self._full: dict[bytes, int] = {}
        self._siblings: defaultdict[tuple[bytes, int], list[int]] = defaultdict(list)

    @property
    def available(self) -> int:
        """Blocks that `take` can still hand out."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that nobody owns and that hold a prefix which may come again."""
        return len(self._idle)

    @property
    def owned(self) -> int:
        return self.blocks - self.available

    def take(self) -> int:
        """A block of the caller's own, contents undefined. Needs `available` > 0."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def references(self, block: int) -> int:
        """How many own it."""
        return self._references[block]

    def share(self, block: int) -> None:
        """One more owner of a cached or owned block."""
        self._idle.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One owner less; a cached block stays until its room is needed."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._entries:
            self._idle[block] = None
        else:
            self._free.append(block)

    def match(self, ids: Sequence[int], feature_id: str) -> Match:
        """The longest cached prefix of `ids`, with its features if any are asked for."""
        size, blocks, names = self.block_size, list[int](), list[bytes]()
        parent = ROOT
        while (len(blocks) + 1) * size <= len(ids):
            name = digest(parent, ids[len(blocks) * size : (len(blocks) + 1) * size])
            block = self._full.get(name)
            if block is None or not self._serves(block, feature_id):
                break
            blocks.append(block)
            names.append(name)
            parent = name
        rest = tuple(ids[len(blocks) * size : (len(blocks) + 1) * size])
        donor, tokens = self._partial(parent, rest, feature_id)
        return Match(tuple(blocks), tuple(names), donor, tokens)

    def _partial(
        self, parent: bytes, rest: tuple[int, ...], feature_id: str
    ) -> tuple[int | None, int]:
        best: tuple[int | None, int] = (None, 0)
        if not rest:
            return best
        for block in self._siblings.get((parent, rest[0]), ())[-PARTIAL_CANDIDATES:]:
            if self._serves(block, feature_id):
                common = _common_prefix(self._entries[block].tokens, rest)
                if common > best[1]:
                    best = (block, common)
        return best

    def _serves(self, block: int, feature_id: str) -> bool:
        return not feature_id or self._entries[block].feature_id == feature_id

    def forget_features(self, feature_id: str) -> None:
        """No block holds features of this version any more; their tokens stay cached."""
        for block, entry in self._entries.items():
            if entry.feature_id == feature_id:
                self._entries[block] = replace(entry, feature_id="")

    def register(
        self, block: int, parent: bytes, tokens: Sequence[int], feature_id: str
    ) -> bytes | None:
        """Remember what an owned block holds; returns its digest if it is full.

        Of two blocks with the same tokens the one with features (the newer, if both have) is kept
        for matching; the other lives on with its owners only.
        """
        full = len(tokens) == self.block_size
        name = digest(parent, tokens) if full else None
        if name is not None:
            twin = self._full.get(name)
            if twin is not None and twin != block:
                if self._entries[twin].feature_id and not feature_id:
                    return name
                self.forget(twin)
        self._forget(block)
        self._entries[block] = Entry(parent, tuple(tokens), feature_id)
        self._siblings[parent, tokens[0]].append(block)
        if name is not None:
            self._full[name] = block
        return name

    def forget(self, block: int) -> None:
        """What it holds serves nobody but its owners any more."""
        self._forget(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _forget(self, block: int) -> None:
        entry = self._entries.pop(block, None)
        if entry is None:
            return
        key = (entry.parent, entry.tokens[0])
        self._siblings[key].remove(block)
        if not self._siblings[key]:
            del self._siblings[key]
        if len(entry.tokens) == self.block_size:
            name = digest(entry.parent, entry.tokens)
            if self._full.get(name) == block:
                del self._full[name]

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Every block is free, idle or owned, exactly once. Raises AssertionError."""
        counts = [0] * self.blocks
        for blocks in owners:
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "references differ from the owners' blocks"
        held = {block for block, count in enumerate(counts) if count}
        parts = [set(self._free), set(self._idle), held]
        assert len(self._free) == len(parts[0]), "a block is free twice"
        assert sum(map(len, parts)) == self.blocks, "a block is lost or in two places"
        assert set().union(*parts) == set(range(self.blocks)), "a block is lost"
        assert set(self._idle) <= set(self._entries), "an idle block holds nothing"
        assert not parts[0] & set(self._entries), "a free block is still named"
        assert set(self._full.values()) <= set(self._entries), "a name leads to a forgotten block"
        listed = [block for blocks in self._siblings.values() for block in blocks]
        assert sorted(listed) == sorted(self._entries), "sibling lists and entries differ"


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
