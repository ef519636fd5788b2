"""A checkpoint's tokenizer: text and chats to ids, ids to text, and which ids end an answer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.core.errors import InvalidRequest, ModelError
from dspark.gateway.text import ByteDetokenizer, Detokenizer, PieceDetokenizer

if TYPE_CHECKING:
    import tokenizers

ROLES = ("system", "developer", "user", "assistant", "tool")

# Decoders (tokenizer.json) that read each piece by itself, but for the first, and so can be
# streamed with one id of context.
_PIECEWISE = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


# A byte where the vocabulary has no piece for a character.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """What transformers loads, narrowed to what serving needs. Safe to share between streams.

    tokenizer: a transformers tokenizer backed by the `tokenizers` library. eos_ids: ids that end an
    answer besides the tokenizer's own.
    Raises `ModelError` for one whose text cannot be streamed exactly.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"{tokenizer.name_or_path}: its tokenizer runs in Python only; "
                "a tokenizer.json is needed"
            )
        self._tokenizer = tokenizer
        self._backend: tokenizers.Tokenizer = backend
        own = tokenizer.eos_token_id
        self.eos_ids = tuple(sorted({*eos_ids, *(() if own is None else (own,))}))
        self.special_ids = frozenset(
            id for id, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self._byte_level = _is_byte_level(backend)
        self._settles = lru_cache(maxsize=None)(self._is_settled)
        self._bytes = lru_cache(maxsize=None)(self._text_bytes)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a checkpoint's directory; its generation_config.json may name further eos ids."""
        from dspark.models import load_tokenizer

        return cls(load_tokenizer(Path(path)), _generation_eos_ids(Path(path)))

    @property
    def vocab_size(self) -> int:
        """Added tokens included; a model's head may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Equal for tokenizers that give each id the same meaning, whatever file they came from."""
        vocab = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        facts = json.dumps([vocab, sorted(self.special_ids)])
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt as it stands, with the tokens its model expects around one (such as BOS)."""
        _check_text("prompt", text)
        return tuple(self._tokenizer.encode(text, verbose=False))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Messages {"role", "content"} through the chat template, up to where the answer begins.

        Raises `InvalidRequest` if there is no template or it does not accept the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "messages", f"{len(messages)} messages", "need a chat template; this model has none"
            )
        if not messages:
            raise InvalidRequest("messages", messages, "must have at least 1 message")
        for i, message in enumerate(messages):
            _check_message(f"messages[{i}]", message)
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise InvalidRequest(
                "messages", [m["role"] for m in messages], f"do not fit the chat template: {error}"
            ) from error
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out, exactly as the model wrote it (transformers'
        clean_up_tokenization_spaces, which takes spaces before punctuation out, is not applied)."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A fresh one, whose pieces join to `decode` of all ids."""
        if self._byte_level:
            return ByteDetokenizer(self._bytes)
        return PieceDetokenizer(self.decode, self._settles)

    def token_bytes(self, id: int) -> bytes:
        """What one id stands for by itself: a special token (which a text leaves out) its name, an
        id that is none nothing."""
        piece = self._backend.id_to_token(id) or ""
        if id in self.special_ids:
            return piece.encode()
        if self._byte_level:
            return self._spelled(piece)
        # After itself, since the first piece of a text may lose a leading space.
        alone = self.decode([id])
        text = self.decode([id, id])[len(alone) :]
        byte = _BYTE.fullmatch(piece)
        # Not every decoder reads such a piece as a byte.
        return bytes.fromhex(byte[1]) if byte and piece not in text else text.encode()

    def _token(self, id: int) -> str | None:
        """None for what decoding leaves out."""
        return None if id in self.special_ids else self._backend.id_to_token(id)

    def _is_settled(self, id: int) -> bool:
        token = self._token(id)
        return token is not None and not (token.startswith("<0x") and token.endswith(">"))

    def _text_bytes(self, id: int) -> bytes:
        return self._spelled(self._token(id) or "")

    def _spelled(self, piece: str) -> bytes:
        """The bytes of a piece of byte-level BPE."""
        try:
            return bytes([_BYTE_OF[char] for char in piece])
        except KeyError:  # an added token that was never spelled in bytes
            return piece.encode()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Which of the two detokenizers is exact; raises `ModelError` if neither is."""
    decoder = json.loads(backend.to_str())["decoder"]
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    # Streaming one piece at a time is exact only while nothing reaches across pieces or back from
    # the end: a strip of more than one leading space, or of any at the end; a rewrite after Fuse.
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    reaching = [
        step["type"]
        for at, step in enumerate(steps)
        if step["type"] not in _PIECEWISE
        or (step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0))
        or (step["type"] == "Replace" and (at > fused or not step["content"]))
    ]
    if reaching:
        raise ModelError(f"tokenizer: text decoded by {' '.join(reaching)} cannot be streamed")
    return False


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _generation_eos_ids(directory: Path) -> tuple[int, ...]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file}: is not a JSON object: {error}") from error
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ModelError(f"{file}: eos_token_id: {ids!r} must be an id or a list of ids")
    return tuple(ids)


def _check_message(field: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, message, 'must be an object with "role" and "content"')
    if message.get("role") not in ROLES:
        raise InvalidRequest(
            f"{field}.role", message.get("role"), f"must be one of {', '.join(ROLES)}"
        )
    _check_text(f"{field}.content", message.get("content"))


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(field, text, "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, text, f"has half a surrogate pair at character {error.start}"
        ) from None
