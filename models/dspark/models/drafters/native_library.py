"""The drafter's part of the native library's C interface (csrc/dspark_draft.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_void_p
from typing import ClassVar

HEADS = {"none": 0, "vanilla": 1, "gated": 2, "rnn": 3}
LAYER_TENSORS = (
    *("query", "query_bias", "kv", "kv_bias", "out", "out_bias", "gate_up", "down"),
    *("attention_norm", "mlp_norm", "q_norm", "k_norm"),
)
HEAD_TENSORS = (
    *("norm", "lm_head", "wavelengths", "w1", "w2", "prepare", "prepare_bias", "step"),
    *("confidence_hidden", "confidence_previous"),
)


class Config(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("inner", "vocab", "gamma", "mask", "draft_vocab")),
        *((name, c_int32) for name in ("candidates", "head", "rank", "head_rows", "confidence")),
        *((name, c_int32) for name in ("block_size", "int8", "half_kv", "threads")),
        *((name, c_float) for name in ("norm_eps", "embed_scale", "softcap")),
        ("kernels", c_char_p),
    ]


class Layer(ctypes.Structure):
    _fields_: ClassVar = [(name, c_void_p) for name in LAYER_TENSORS]


class Head(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in HEAD_TENSORS),
        ("confidence_bias", c_float),
        ("index", c_void_p),
    ]


class Context(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("R", "window")),
        *((name, c_void_p) for name in ("first", "counts", "slots", "blocks")),
        *((name, c_void_p) for name in ("features", "rings")),
    ]


class Block(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("R", "steps", "greedy")),
        *((name, c_void_p) for name in ("anchors", "starts", "held", "blocks")),
        *((name, c_void_p) for name in ("rings", "columns", "confidences", "candidates")),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "dn_drafter_create": (c_void_p, [POINTER(Config), c_void_p, c_void_p]),
    "dn_drafter_shares": (c_int, [c_void_p]),
    "dn_drafter_set_layer": (c_int, [c_void_p, c_int, POINTER(Layer)]),
    "dn_drafter_set_head": (c_int, [c_void_p, POINTER(Head)]),
    "dn_drafter_destroy": (None, [c_void_p]),
    "dn_drafter_kernels": (c_char_p, [c_void_p]),
    "dn_drafter_inject": (c_int, [c_void_p, POINTER(Context)]),
    "dn_drafter_block": (c_int, [c_void_p, POINTER(Block)]),
    "dn_drafter_next": (c_int, [c_void_p, c_int, c_void_p, c_void_p, c_void_p]),
    "dn_drafter_products": (c_int, [c_void_p, c_int32, c_int32]),
}


def drafting(library: ctypes.CDLL) -> ctypes.CDLL:
    """A library that `load_library` opened, its drafting functions typed."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
