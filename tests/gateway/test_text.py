"""Ids to text and back, over tokenizers made here: what is shown no later id changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark.core.errors import InvalidRequest, ModelError
from dspark.gateway import TextStream, Tokenizer
from dspark.gateway.text import PROBED_RUN, Detokenizer, StopStrings, borders

SAMPLES = (
    "Hello, world! The quick brown fox jumps.\n\nStop.",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "日本語と中文,한국어 ﷽",
    "cafe\u0301 n\u0303 Z\u0361a\u0338 résumé",
    "\ufffd is a character too; � ends",
    "  indented\n\tcode = {'a': 1}  ",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

STRIPPED = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
KINDS: dict[str, Any] = {
    "byte level": decoders.ByteLevel(),
    "sentencepiece, first space stripped": decoders.Sequence(STRIPPED),
    "sentencepiece, none stripped": decoders.Sequence(STRIPPED[:3]),
    "metaspace": decoders.Metaspace(),
    "metaspace, bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "none": None,
}
BYTE_LEVEL, SENTENCEPIECE = list(KINDS)[:2]


def backend(kind: str) -> tokenizers.Tokenizer:
    made: tokenizers.Tokenizer
    if kind == BYTE_LEVEL:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=340,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
            show_progress=False,
        )
        made.train_from_iterator(SAMPLES * 4, trainer)
    else:
        pieces = ["▁", "▁▁", "▁Hello", "▁a", "b", "ab", "▁b", "St", "op", "é", "日", "\ufffd", " "]
        vocab = [("<unk>", 0.0), *((piece, -float(len(piece))) for piece in pieces)]
        vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
        made = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.add_special_tokens(["<s>", "</s>"])
    # Spelled as no byte-level token is: a space, and a letter that spells no byte.
    made.add_tokens(["added é", "日x", "▁added"])
    spec = json.loads(made.to_str())
    decoder = KINDS[kind]
    spec["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend(kind), eos_token="</s>"))


def ids_of(text: str, kind: str = BYTE_LEVEL) -> list[int]:
    return list(tokenizer(kind).encode(text))


def run_of(data: bytes, kind: str = SENTENCEPIECE) -> list[int]:
    """Byte tokens."""
    vocab = backend(kind).get_vocab()
    return [vocab[f"<0x{byte:02X}>"] for byte in data]


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


any_kind = pytest.mark.parametrize("kind", KINDS)
TEXTS = st.text(st.sampled_from([*"ab Stop\n.é日😀\u0301\u200d\ufffd👩"]), max_size=30)
# Anything the vocabularies hold, ids they do not hold, and stretches of byte tokens.
SOUPS = st.lists(st.integers(0, 400), max_size=40) | st.lists(st.integers(14, 270), max_size=20)


# --- detokenizer


@any_kind
@pytest.mark.parametrize("text", SAMPLES)
def test_whole_texts_come_back_in_pieces(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text)
    came = pieces(tokenizer(kind).detokenizer(), ids)
    assert "".join(came) == tokenizer(kind).decode(ids)
    if kind == BYTE_LEVEL:
        assert "".join(came) == text


@any_kind
@given(SOUPS | TEXTS)
def test_pieces_join_to_the_decoding_of_all_ids(kind: str, soup: list[int] | str) -> None:
    ids = ids_of(soup, kind) if isinstance(soup, str) else soup
    assert "".join(pieces(tokenizer(kind).detokenizer(), ids)) == tokenizer(kind).decode(ids)


@any_kind
@given(SOUPS, SOUPS)
def test_what_is_shown_stands_whatever_comes(kind: str, ids: list[int], more: list[int]) -> None:
    detokenizer = tokenizer(kind).detokenizer()
    shown = "".join([detokenizer.push(token) for token in ids])
    assert tokenizer(kind).decode(ids + more).startswith(shown)
    tail = detokenizer.tail()
    if tail:
        assert tokenizer(kind).decode(ids) == shown + tail


@any_kind
def test_decoding_is_transformers_own(kind: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend(kind))
    ids = [*ids_of("Stop ab, é 日.", kind), 0, 5, 1]
    assert tokenizer(kind).decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_an_incomplete_character_waits_and_the_rest_does_not() -> None:
    detokenizer = tokenizer(BYTE_LEVEL).detokenizer()
    vocab = backend(BYTE_LEVEL).get_vocab()
    spelled = {0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0x80: "Ģ"}
    came = [detokenizer.push(vocab[spelled[b]]) for b in "😀".encode()]
    assert came == ["", "", "", "😀"]
    assert detokenizer.push(vocab["a"]) == "a"
    assert detokenizer.push(vocab["ð"]) == ""
    assert detokenizer.push(vocab["a"]) == "\ufffda"
    assert detokenizer.push(vocab["ð"]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_run_of_byte_tokens_stands_or_falls_as_a_whole() -> None:
    b = backend(SENTENCEPIECE).get_vocab()["b"]
    good, bad = run_of("日".encode()), run_of("日".encode() + b"\xff")
    assert pieces(tokenizer(SENTENCEPIECE).detokenizer(), [*good, b]) == ["", "", "", "日b", ""]
    assert pieces(tokenizer(SENTENCEPIECE).detokenizer(), bad)[-1] == "\ufffd" * 4


def test_special_and_unknown_ids_are_silent() -> None:
    for kind in KINDS:
        made = backend(kind)
        special = made.get_vocab()["</s>"]
        assert "".join(pieces(tokenizer(kind).detokenizer(), [special, 10_000])) == ""


def test_detokenizing_is_linear() -> None:
    """Lone lead bytes never end a character: nothing may be read again at each of them."""
    vocab = backend(BYTE_LEVEL).get_vocab()

    def seconds(count: int) -> float:
        times = []
        for _ in range(3):
            began = time.thread_time()
            pieces(tokenizer(BYTE_LEVEL).detokenizer(), [vocab["ð"]] * count)
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(40_000) < 40 * seconds(4_000)


# --- stop strings

ALPHABET = st.text("ab", min_size=1, max_size=5)
STOPS = st.lists(ALPHABET, min_size=1, max_size=4)
CHUNKS = st.lists(st.text("abc", max_size=4), max_size=12)


def brute_stop(text: str, stops: Sequence[str], armed: Callable[[int], bool]) -> int | None:
    """Where to cut: the first end at which an armed stop string is complete, its longest start."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found and armed(end):
            return end - max(found)
    return None


def brute_hold(text: str, stops: Sequence[str]) -> int:
    return max(
        n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])
    )  # n = 0 always holds


@given(STOPS, CHUNKS)
@example(["aab"], ["aaab"])
@example(["b", "aab"], ["aa", "b"])
def test_stop_strings_cut_where_brute_force_does(stops: list[str], chunks: list[str]) -> None:
    matcher = StopStrings(stops)
    cut = brute_stop("".join(chunks), stops, lambda _: True)
    shown, came = "", ""
    for chunk in chunks:
        would = matcher.completes(chunk)
        piece, stopped = matcher.push(chunk)
        came, shown = came + chunk, shown + piece
        assert stopped == would
        if stopped:
            assert shown == came[:cut]
            return
        assert shown == came[: len(came) - brute_hold(came, stops)]  # no more, and no less
    assert cut is None
    assert shown + matcher.flush() == came


@given(STOPS, CHUNKS, st.integers(0, 12))
@example(["aa"], ["aa", "a"], 1)
def test_an_unarmed_stop_string_is_text(stops: list[str], chunks: list[str], first: int) -> None:
    """One completed in piece `first` or later counts, wherever it began."""
    matcher = StopStrings(stops)
    lead = len("".join(chunks[:first]))
    cut = brute_stop("".join(chunks), stops, lambda end: end > lead)
    shown, stopped = "", False
    for i, chunk in enumerate(chunks):
        piece, stopped = matcher.push(chunk, armed=i >= first)
        shown += piece
        if stopped:
            break
    assert stopped == (cut is not None)
    assert shown + matcher.flush() == "".join(chunks)[:cut]


@given(st.text("ab", min_size=1, max_size=12))
@example("aabaaab")
def test_borders_are_those_brute_force_finds(stop: str) -> None:
    for end, border in enumerate(borders(stop), start=1):
        assert border == max(n for n in range(end) if stop[:end].endswith(stop[:n]))


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopStrings([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ""


def test_matching_is_linear() -> None:
    """The worst stop string and text: every character falls back."""

    def seconds(length: int) -> float:
        times = []
        for _ in range(3):
            matcher = StopStrings(["a" * 1000 + "b"])
            began = time.thread_time()
            for _ in range(length // 1000):
                matcher.push("a" * 999 + "c")
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(100_000) < 40 * seconds(10_000)


# --- the stream


def drain(stream: TextStream, ids: Sequence[int], step: int = 1) -> tuple[str, int, bool]:
    text = ""
    for at in range(0, len(ids), step):
        piece = stream.push(ids[at : at + step])
        text += piece.text
    last = stream.finish()
    return text + last.text, last.tokens, last.stopped


@pytest.mark.parametrize(
    ("said", "stops", "shown"),
    [
        ("Hello, world!", [], "Hello, world!"),
        ("Hello, world!", ["wor"], "Hello, "),  # spans tokens
        ("Hello, world!", ["o"], "Hell"),  # inside one token's text
        ("one two", ["two three"], "one two"),  # only begun
        ("a\n\nb", ["\n\n", "\n"], "a"),  # the one that is complete first
        ("xaab", ["b", "aab"], "x"),  # the longest of two at once
        ("ab😀cd", ["😀c"], "ab"),  # spans a character in pieces
        ("日本語。次", ["。"], "日本語"),
        ("Stop", ["Stop"], ""),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_stop_string_ends_the_text_before_itself(
    said: str, stops: list[str], shown: str, step: int
) -> None:
    ids = ids_of(said + " and more after it" if stops else said)
    stream = TextStream(tokenizer(BYTE_LEVEL).detokenizer(), stops)
    text, tokens, stopped = drain(stream, ids, step)
    if shown == said or stops == ["two three"]:
        assert (stopped, tokens) == (False, len(ids))
        assert text == tokenizer(BYTE_LEVEL).decode(ids)
        return
    assert (text, stopped) == (shown, True)
    decode = tokenizer(BYTE_LEVEL).decode
    assert any(stop in decode(ids[:tokens]) for stop in stops)
    assert not any(stop in decode(ids[: tokens - 1]) for stop in stops)
    assert stream.push(ids).text == ""
    assert stream.push(ids).tokens == tokens


@any_kind
@given(TEXTS, st.lists(st.sampled_from(["a", "op", "St", "\n", "😀", "b S", "aba", "é日"])), SOUPS)
def test_streams_cut_as_if_each_id_were_the_last(
    kind: str, said: str, stops: list[str], soup: list[int]
) -> None:
    """However many ids come at once; what is shown is never more than the cut leaves."""
    ids = ids_of(said, kind) + soup + ids_of(said, kind)
    expected = (tokenizer(kind).decode(ids), len(ids), False)
    for count in range(1, len(ids) + 1):
        text = tokenizer(kind).decode(ids[:count])
        cut = brute_stop(text, stops, lambda _: True)
        if cut is not None and not _ends_inside_a_run(kind, ids[:count]):
            expected = (text[:cut], count, True)
            break
    for step in (1, 4):
        assert drain(TextStream(tokenizer(kind).detokenizer(), stops), ids, step) == expected


def _ends_inside_a_run(kind: str, ids: Sequence[int]) -> bool:
    """Whether the last ids are bytes that do not read as text yet (or never will)."""
    detokenizer = tokenizer(kind).detokenizer()
    shown = "".join([detokenizer.push(token) for token in ids])
    return tokenizer(kind).decode(ids) != shown + detokenizer.tail()


def test_no_beginning_of_a_stop_string_leaks() -> None:
    stream = TextStream(tokenizer(BYTE_LEVEL).detokenizer(), ["<stop>", "<start>"])
    came = [stream.push([token]).text for token in ids_of("a <st b <sto")]
    assert "".join(came) == "a <st b "
    assert not any("<sto" in piece for piece in came)
    assert stream.finish().text == "<sto"


def test_a_stop_string_in_a_run_of_byte_tokens_is_seen_at_once() -> None:
    """Llama 2 spells a newline so. Waiting for the id after it would cost a token."""
    hello = ids_of("Hello ab", SENTENCEPIECE)
    newline = run_of(b"\n")
    stream = TextStream(tokenizer(SENTENCEPIECE).detokenizer(), ["\n"])
    shown = stream.push(hello).text
    piece = stream.push([*newline, *hello])
    assert (shown + piece.text, piece.tokens, piece.stopped) == ("Hello ab", len(hello) + 1, True)
    # Not for a character that is not whole, nor, to stay linear, in a very long run.
    stream = TextStream(tokenizer(SENTENCEPIECE).detokenizer(), ["\ufffd"])
    assert not stream.push(run_of("日".encode()[:2])).stopped
    stream = TextStream(tokenizer(SENTENCEPIECE).detokenizer(), ["\n"])
    assert not stream.push(run_of(b"a" * PROBED_RUN + b"\n")).stopped
    assert stream.finish().text == "a" * PROBED_RUN


@pytest.mark.parametrize(
    ("min_tokens", "text", "tokens", "stopped"),
    [
        (0, "", 1, True),
        (1, "", 1, True),
        (2, "ab", 3, True),
        (3, "ab", 3, True),
        (4, "abab", 4, False),
    ],
)
def test_stop_strings_wait_for_min_tokens(
    min_tokens: int, text: str, tokens: int, stopped: bool
) -> None:
    vocab = backend(BYTE_LEVEL).get_vocab()
    ids = [vocab["a"], vocab["b"], vocab["a"], vocab["b"]]
    stream = TextStream(tokenizer(BYTE_LEVEL).detokenizer(), ["a"], min_tokens)
    assert drain(stream, ids) == (text, tokens, stopped)


def test_a_stop_string_begun_before_min_tokens_counts() -> None:
    vocab = backend(BYTE_LEVEL).get_vocab()
    stream = TextStream(tokenizer(BYTE_LEVEL).detokenizer(), ["ab"], min_tokens=2)
    assert drain(stream, [vocab["a"], vocab["b"]]) == ("", 2, True)


def test_a_stop_string_can_end_in_what_the_end_releases() -> None:
    stream = TextStream(tokenizer(BYTE_LEVEL).detokenizer(), ["b\ufffd"])
    vocab = backend(BYTE_LEVEL).get_vocab()
    assert stream.push([vocab["a"], vocab["b"], vocab["ð"]]).text == "a"
    last = stream.finish()
    assert (last.text, last.tokens, last.stopped) == ("", 3, True)


# --- tokenizer


def save(directory: Path, kind: str = BYTE_LEVEL, **settings: Any) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=backend(kind), bos_token="<s>", eos_token="</s>", **settings
    ).save_pretrained(directory)
    return directory


@any_kind
def test_a_saved_tokenizer_loads(kind: str, tmp_path: Path) -> None:
    loaded = Tokenizer.load(save(tmp_path, kind))
    ids = loaded.encode("Hello ab日")
    assert ids == tokenizer(kind).encode("Hello ab日")
    assert loaded.decode(ids) == tokenizer(kind).decode(ids)
    vocab = backend(kind).get_vocab()
    assert loaded.special_ids == {vocab["<s>"], vocab["</s>"]}
    assert loaded.vocab_size == len(vocab)
    assert loaded.tokenizer_hash == tokenizer(kind).tokenizer_hash


@any_kind
@pytest.mark.parametrize("text", SAMPLES)
def test_the_bytes_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    made = tokenizer(kind)
    ids = made.encode(text)
    spelled = b"".join(made.token_bytes(id) for id in ids).decode()
    assert spelled in (made.decode(ids), " " + made.decode(ids))  # that space is the decoder's
    assert made.token_bytes(made.eos_ids[0]) == b"</s>", "which no text has"
    assert made.token_bytes(10**6) == b""


def test_the_hash_tells_vocabularies_apart() -> None:
    hashes = {tokenizer(BYTE_LEVEL).tokenizer_hash, tokenizer(SENTENCEPIECE).tokenizer_hash}
    longer = backend(BYTE_LEVEL)
    longer.add_tokens(["one more"])
    special = backend(BYTE_LEVEL)
    special.add_special_tokens(["日x"])
    for made in (longer, special):
        hashes.add(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made)).tokenizer_hash)
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("generation_config", "extra"),
    [
        (None, []),
        ({}, []),
        ({"eos_token_id": None}, []),
        ({"eos_token_id": 7}, [7]),
        ({"eos_token_id": [9, 7, 1]}, [7, 9]),
    ],
)
def test_eos_ids_come_from_both_files(
    generation_config: dict[str, object] | None, extra: list[int], tmp_path: Path
) -> None:
    save(tmp_path)
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert Tokenizer.load(tmp_path).eos_ids == (1, *extra)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": -1}'])
def test_a_broken_generation_config_is_named(content: str, tmp_path: Path) -> None:
    (save(tmp_path) / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)


def test_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.load(tmp_path / "nothing")


def test_chat_ends_where_the_answer_begins() -> None:
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend(BYTE_LEVEL), eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    chatty = Tokenizer(made)
    ids = chatty.chat([{"role": "system", "content": "be"}, {"role": "user", "content": "Hi"}])
    assert ids == chatty.encode("<s>system\nbe</s><s>user\nHi</s><s>assistant\n")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "no role"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": "u</s>", "content": "b"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": ["parts"]}], "messages[0].content"),
        ([{"role": "user", "content": "half \ud83d"}], "messages[0].content"),
        ([{"role": "tool", "content": "the template refuses it"}], "messages"),
    ],
)
def test_bad_messages_are_named(messages: Any, field: str) -> None:
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend(BYTE_LEVEL), chat_template=CHAT_TEMPLATE
    )
    with pytest.raises(InvalidRequest) as caught:
        Tokenizer(made).chat(messages)
    assert caught.value.field == field


def test_no_chat_template_is_said() -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        tokenizer(BYTE_LEVEL).chat([{"role": "user", "content": "hi"}])


def test_a_prompt_with_half_a_character_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer(BYTE_LEVEL).encode("half \ud83d")


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Replace("▁", ""), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ],
)
def test_what_cannot_be_streamed_exactly_is_refused(decoder: Any) -> None:
    made = backend(SENTENCEPIECE)
    made.decoder = decoder
    with pytest.raises(ModelError, match="cannot be streamed"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


def test_the_door_brings_neither_torch_nor_transformers() -> None:
    code = "import sys, dspark.gateway; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
