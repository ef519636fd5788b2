"""KV blocks and what is kept in them: the pool, sequences' use of it, and features beside it.

Two machines draw sequences of operations. One holds `BlockPool` against a model that remembers
whole texts and searches all of them; the other runs `KVCache` over blocks that say what was written
into them, so that a prefix hit which brings anything else shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.core.requests import Request
from dspark.core.sequence import SequenceState
from dspark.verifier.blocks import ROOT, BlockPool, Match, digest
from dspark.verifier.features import FeatureCache
from dspark.verifier.kv_cache import KVCache
from dspark.verifier.sequence import Sequence

SIZE = 3  # tokens a block: the smallest with a middle
BLOCKS = 8
Ids = tuple[int, ...]

# Two ids and three features: blocks often begin alike, are equal, and differ in features alone.
features = st.sampled_from(["", "a", "b"])


def texts(max_blocks: int = 3) -> st.SearchStrategy[Ids]:
    return st.lists(st.integers(0, 1), min_size=1, max_size=max_blocks * SIZE).map(tuple)


def parent_of(text: Ids) -> bytes:
    """Name of what precedes the last block of a text."""
    name = ROOT
    for start in range(0, block_start(text), SIZE):
        name = digest(name, text[start : start + SIZE])
    return name


def block_start(text: Ids) -> int:
    """Where the last block of a text begins."""
    return (len(text) - 1) // SIZE * SIZE


@dataclass(frozen=True)
class Content:
    """A cached block: the text up to its end, and which features it has."""

    text: Ids
    feature_id: str


class PoolAgainstItsModel(RuleBasedStateMachine):
    """The pool against lists: who holds what, what is cached, what went idle in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.held: list[int] = []  # one entry an owner
        self.idle: list[int] = []
        self.contents: dict[int, Content] = {}

    @property
    def free(self) -> set[int]:
        return set(range(BLOCKS)) - set(self.held) - set(self.idle)

    @precondition(lambda self: self.free or self.idle)
    @rule()
    def take(self) -> None:
        """A free block while there is one, then the cached one that was let go first."""
        candidates = self.free or {self.idle[0]}
        block = self.pool.take()
        assert block in candidates
        if block in self.idle:
            self.idle.remove(block)
            del self.contents[block]
        self.held.append(block)

    @precondition(lambda self: self.held or self.idle)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held, *self.idle})))
        self.pool.share(block)
        if block in self.idle:
            self.idle.remove(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release(block)
        self.held.remove(block)
        if block not in self.held and block in self.contents:
            self.idle.append(block)

    def text(self, data: st.DataObject) -> Ids:
        """Any, or one that leaves a cached one somewhere."""
        cached = [content.text for content in self.contents.values()]
        if not cached or data.draw(st.booleans()):
            return data.draw(texts())
        text = data.draw(st.sampled_from(cached))
        kept = data.draw(st.integers(0, len(text) - 1))
        return (*text[:kept], *data.draw(texts(1)))[: 3 * SIZE]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), feature_id=features)
    def register(self, data: st.DataObject, feature_id: str) -> None:
        """Of two full blocks with one text, the featureless never displaces one with features."""
        block, text = data.draw(st.sampled_from(self.held)), self.text(data)
        parent, tokens = parent_of(text), text[block_start(text) :]
        name = self.pool.register(block, parent, tokens, feature_id)
        assert name == (digest(parent, tokens) if len(tokens) == SIZE else None)
        twins = [b for b, c in self.contents.items() if c.text == text and b != block]
        if name is not None and twins:
            [twin] = twins
            if self.contents[twin].feature_id and not feature_id:
                return
            del self.contents[twin]
            if twin in self.idle:
                self.idle.remove(twin)
        self.contents[block] = Content(text, feature_id)

    @rule(data=st.data(), feature_id=features)
    def match(self, data: st.DataObject, feature_id: str) -> None:
        text = self.text(data)
        found = self.pool.match(text, feature_id)
        serving = {
            block: content.text
            for block, content in self.contents.items()
            if feature_id in ("", content.feature_id)
        }
        for i, (block, name) in enumerate(zip(found.blocks, found.names, strict=True), start=1):
            assert serving[block] == text[: i * SIZE]
            assert name == digest(parent_of(text[: i * SIZE]), text[(i - 1) * SIZE : i * SIZE])
        whole = len(found.blocks) * SIZE
        if found.donor is None:
            assert found.tokens == 0
        else:
            donated = serving[found.donor]
            assert block_start(donated) == whole
            assert donated[: whole + found.tokens] == text[: whole + found.tokens]
        assert whole + found.tokens == longest_prefix(text, list(serving.values()))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.pool.check_integrity([[block] for block in self.held])
        assert self.pool.available == len(self.free) + len(self.idle)
        assert self.pool.owned == len(set(self.held))


def longest_prefix(text: Ids, cached: Seq[Ids]) -> int:
    """By trying every length: the blocks before text[n] are cached, and one that begins like the
    rest of text[:n]."""

    def covered(n: int) -> bool:
        start = block_start(text[:n])
        return all(text[:end] in cached for end in range(SIZE, start + 1, SIZE)) and any(
            block_start(other) == start and other[:n] == text[:n] for other in cached
        )

    return max((n for n in range(1, len(text) + 1) if covered(n)), default=0)


TestPool = PoolAgainstItsModel.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Pages:
    """The part of a backend that a `KVCache` uses. A slot holds the text up to its token, which is
    what keys and values depend on."""

    block_size = SIZE

    def allocate(self, blocks: int) -> None:
        self.slots: list[Ids | None] = [None] * (blocks * SIZE)

    def copy(self, src_block: int, dst_block: int) -> None:
        self.slots[dst_block * SIZE : (dst_block + 1) * SIZE] = self.slots[
            src_block * SIZE : (src_block + 1) * SIZE
        ]


def row(feature_id: str, text: Ids) -> float:
    """A feature that tells apart versions and texts; 24 bits are exact in float32."""
    return float(zlib.crc32(repr((feature_id, text)).encode()) >> 8)


def sequence(text: Ids, feature_id: str = "") -> Sequence:
    request = Request("r", text)
    state = SequenceState(request, eos_ids=(), max_tokens_total=10**6, arrival=0)
    return Sequence(state, rng=np.random.default_rng(0), feature_id=feature_id)


class Bench:
    """A cache of BLOCKS blocks, and the writing that steps do."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.pages = Pages()
        self.cache = KVCache(self.pages, blocks)  # type: ignore[arg-type]
        for feature_id in ("a", "b"):
            self.cache.features.open(feature_id, 1)

    def write(self, s: Sequence, start: int, ids: Ids) -> None:
        """A forward pass over ids[start:] of a sequence."""
        for position in range(start, len(ids)):
            block = s.blocks[position // SIZE]
            self.pages.slots[block * SIZE + position % SIZE] = ids[: position + 1]
        if s.feature_id:
            rows = [[row(s.feature_id, ids[: p + 1])] for p in range(start, len(ids))]
            self.cache.features.store(s.feature_id, s.blocks, start, np.array(rows, np.float32))

    def compute(self, s: Sequence, tokens: int) -> None:
        """A prefill chunk."""
        end = s.state.computed + tokens
        self.write(s, s.state.computed, tuple(s.state.ids[:end]))
        s.state.computed = end
        self.cache.remember(s)

    def serve(self, text: Ids, feature_id: str = "") -> Sequence:
        """Attach and compute all but the last token."""
        s = sequence(text, feature_id)
        assert self.cache.attach(s)
        self.compute(s, s.state.uncomputed - 1)
        return s

    def check(self, s: Sequence) -> None:
        """What a sequence counts as computed is what its own text would have written."""
        ids = tuple(s.state.ids)
        texts = [ids[: position + 1] for position in range(s.state.computed)]
        assert texts == [
            self.pages.slots[s.blocks[p // SIZE] * SIZE + p % SIZE] for p in range(len(texts))
        ]
        if s.feature_id:
            rows = self.cache.features.read(s.feature_id, s.blocks, 0, len(texts))
            assert rows[:, 0].tolist() == [row(s.feature_id, text) for text in texts]


class CacheServesWhatWasWritten(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, decode with drafts beside, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.running: list[Sequence] = []

    @rule(text=texts(), feature_id=features)
    def attach(self, text: Ids, feature_id: str) -> None:
        s = sequence(text, feature_id)
        enough = self.bench.cache.pool.available * SIZE >= len(text)
        attached = self.bench.cache.attach(s)
        # Hits may make less room do, and never make enough too little.
        assert attached or not enough
        if attached:
            assert len(s.blocks) == -(-len(text) // SIZE)
            assert s.state.uncomputed >= 1
            self.running.append(s)
        else:
            assert s.blocks == []

    @precondition(lambda self: any(s.state.uncomputed > 1 for s in self.running))
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from([s for s in self.running if s.state.uncomputed > 1]))
        self.bench.compute(s, data.draw(st.integers(1, s.state.uncomputed - 1)))

    @precondition(lambda self: any(s.state.uncomputed == 1 for s in self.running))
    @rule(data=st.data(), token=st.integers(0, 1), right=texts(1), rejected=st.integers(0, 3))
    def verify(self, data: st.DataObject, token: int, right: Ids, rejected: int) -> None:
        """The anchor and a draft are run; `right` of it stands, `token` comes after that."""
        s = data.draw(st.sampled_from([s for s in self.running if s.state.uncomputed == 1]))
        ids = tuple(s.state.ids)
        draft = (*right, 1 - token, *[token] * rejected)
        if not self.bench.cache.extend(s, len(ids) + len(draft)):
            return
        self.bench.write(s, s.state.computed, (*ids, *draft))
        s.state.commit((*right, token))
        s.state.computed += 1 + len(right)
        self.bench.cache.remember(s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(self.running))
        self.running.remove(s)
        self.bench.cache.release(s)
        assert s.blocks == []
        assert s.state.computed == 0

    @invariant()
    def every_sequence_has_its_own_text(self) -> None:
        for s in self.running:
            self.bench.check(s)
        self.bench.cache.pool.check_integrity([s.blocks for s in self.running])


TestCache = CacheServesWhatWasWritten.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


# --- The pool, one promise at a time


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(2, SIZE)


def test_the_block_with_features_is_kept_of_two_with_the_same_tokens(pool: BlockPool) -> None:
    text = (1, 0, 1)
    bare, featured = pool.take(), pool.take()
    name = pool.register(bare, ROOT, text, "")
    assert pool.register(featured, ROOT, text, "a") == name
    assert pool.match(text, "a").blocks == (featured,)
    assert pool.match(text, "").blocks == (featured,)
    # The other way round, a bare one coming later displaces nothing.
    assert pool.register(bare, ROOT, text, "") == name
    assert pool.match(text, "a").blocks == (featured,)
    assert pool.match(text, "b").blocks == ()


def test_of_two_blocks_with_features_the_newer_is_kept(pool: BlockPool) -> None:
    older, newer = pool.take(), pool.take()
    pool.register(older, ROOT, (1, 0, 1), "a")
    pool.register(newer, ROOT, (1, 0, 1), "b")
    assert pool.match((1, 0, 1), "b").blocks == (newer,)
    assert pool.match((1, 0, 1), "a").blocks == ()


def test_a_block_that_lost_its_name_while_idle_is_free(pool: BlockPool) -> None:
    older, newer = pool.take(), pool.take()
    pool.register(older, ROOT, (1, 0, 1), "a")
    pool.release(older)
    pool.register(newer, ROOT, (1, 0, 1), "a")
    pool.check_integrity([[newer]])
    assert pool.take() == older


def test_a_block_continues_only_the_text_it_was_computed_after(pool: BlockPool) -> None:
    """The same tokens behind another beginning have other keys and values."""
    first, second = pool.take(), pool.take()
    name = pool.register(first, ROOT, (0, 0, 0), "")
    assert name is not None
    pool.register(second, name, (1, 1, 1), "")
    assert pool.match((0, 0, 0, 1, 1, 1), "").blocks == (first, second)
    assert pool.match((1, 1, 1), "") == Match((), (), None, 0)


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([[0], [0]], id="one owner too many"),
        pytest.param([], id="one too few"),
        pytest.param([[1]], id="another block"),
    ],
)
def test_the_integrity_check_tells_when_owners_and_pool_differ(owners: list[list[int]]) -> None:
    pool = BlockPool(2, SIZE)
    assert pool.take() == 0
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError):
        pool.check_integrity(owners)


# --- Sequences and their blocks


def test_the_tail_of_a_prefix_is_evicted_before_its_beginning() -> None:
    bench = Bench(blocks=4)
    text = (0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0)
    s = bench.serve(text)
    bench.cache.release(s)
    pool = bench.cache.pool
    left = [len(pool.match(text, "").blocks)]
    for _ in range(4):
        pool.take()
        left.append(len(pool.match(text, "").blocks))
    assert left == [3, 3, 2, 1, 0]  # the fourth block is part-filled: its last token never ran


def test_a_sequence_that_finds_no_room_leaves_its_prefix_as_lasting_as_it_was() -> None:
    bench = Bench(blocks=4)
    text = (0, 0, 0, 0, 0, 1, 0)
    bench.cache.release(bench.serve(text))
    running = bench.serve((1,))
    assert not bench.cache.attach(sequence((*text, *text)))
    bench.cache.pool.check_integrity([running.blocks])
    bench.cache.pool.take()
    bench.cache.pool.take()
    assert len(bench.cache.pool.match(text, "").blocks) == 1, "the beginning went before the tail"


def test_a_prefix_hit_leaves_the_last_token_to_compute() -> None:
    """Its logits are what the sequence waits for."""
    bench = Bench()
    text = (0, 1, 0, 1, 1, 0)
    s = bench.serve((*text, 1))
    s.state.commit((1,))
    bench.compute(s, 1)
    bench.cache.release(s)
    again = sequence(text)
    assert bench.cache.attach(again)
    assert again.state.computed == again.state.cached == len(text) - 1
    bench.check(again)


def test_a_hit_inside_a_block_brings_a_copy_of_keys_values_and_features() -> None:
    bench = Bench()
    first = bench.serve((0, 1, 0, 1, 1, 1, 0), "a")
    parting = sequence((0, 1, 0, 1, 1, 0, 0), "a")
    assert bench.cache.attach(parting)
    assert parting.state.computed == 5
    assert parting.blocks[0] == first.blocks[0]
    assert parting.blocks[1] != first.blocks[1]
    bench.compute(parting, 1)
    bench.check(parting)
    bench.check(first)


def test_features_of_one_version_do_not_serve_another() -> None:
    bench = Bench()
    text = (0, 1, 0, 1, 1, 1, 0)
    bench.serve(text, "a")
    for feature_id, cached in (("b", 0), ("a", 6), ("", 6)):
        s = sequence(text, feature_id)
        assert bench.cache.attach(s)
        assert s.state.cached == cached


def test_a_sequence_as_large_as_the_pool_gets_in_over_what_is_cached() -> None:
    """Holding the block that it begins like would leave one too few, for ever."""
    bench = Bench(blocks=2)
    bench.cache.release(bench.serve((0, 0, 1, 1)))
    whole = sequence((0, 0, 0, 0, 0, 0))
    assert bench.cache.attach(whole)
    assert len(whole.blocks) == 2
    bench.cache.pool.check_integrity([whole.blocks])


def test_growing_takes_all_that_is_missing_or_nothing() -> None:
    bench = Bench(blocks=3)
    s = bench.serve((0, 1))
    assert bench.cache.spare_tokens(s) == 1
    assert bench.cache.extend(s, 3)
    assert len(s.blocks) == 1
    assert not bench.cache.extend(s, 10)
    assert len(s.blocks) == 1
    assert bench.cache.extend(s, 9)
    assert bench.cache.spare_tokens(s) == 7
    bench.cache.pool.check_integrity([s.blocks])


def test_the_table_has_a_row_a_sequence_padded_with_a_valid_block() -> None:
    bench = Bench()
    long, short = bench.serve((0, 1, 0, 1)), bench.serve((1,))
    table = bench.cache.table([short, long])
    assert table.dtype == np.int32
    assert table[1].tolist() == long.blocks
    assert table[0, :1].tolist() == short.blocks
    assert 0 <= table[0, 1] < BLOCKS


# --- Features beside the blocks


@pytest.mark.parametrize("at_once", [False, True])
def test_features_live_in_the_slots_of_their_blocks(at_once: bool) -> None:
    cache = FeatureCache(4, SIZE)
    cache.open("a", 2, at_once=at_once)
    blocks = [2, 0, 3]
    rows = np.arange(14, dtype=np.float32).reshape(7, 2)
    cache.store("a", blocks, 0, rows[:2])
    cache.store("a", blocks, 2, rows[2:])
    assert np.array_equal(cache.read("a", blocks, 0, 7), rows)
    assert np.array_equal(cache.read("a", blocks, 2, 5), rows[2:5])
    assert np.array_equal(cache.read("a", [0], 0, 3), rows[3:6])
    assert cache.read("a", blocks, 4, 4).shape == (0, 2)


def test_what_was_read_is_the_readers_own() -> None:
    cache = FeatureCache(1, SIZE)
    cache.open("a", 1)
    before = cache.read("a", [0], 0, 3)
    cache.store("a", [0], 0, np.ones((3, 1), np.float32))
    assert not before.any()


def test_copying_a_block_copies_the_features_of_every_version() -> None:
    cache = FeatureCache(3, SIZE)
    for feature_id, width in (("a", 1), ("b", 4)):
        cache.open(feature_id, width)
        cache.store(feature_id, [1], 0, np.ones((3, width), np.float32))
    cache.copy(1, 2)
    for feature_id in ("a", "b"):
        assert cache.read(feature_id, [2], 0, 3).all()
        assert not cache.read(feature_id, [0], 0, 3).any()


def test_opening_a_version_again_keeps_its_rows() -> None:
    cache = FeatureCache(1, SIZE)
    cache.open("a", 1)
    cache.store("a", [0], 0, np.ones((3, 1), np.float32))
    cache.open("a", 1)
    assert cache.read("a", [0], 0, 3).all()
