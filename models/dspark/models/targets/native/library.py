"""The native library of this machine, found or made, and its C interface (csrc/dspark_native.h)."""

from __future__ import annotations

import ctypes
import hashlib
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import ClassVar

from dspark.models.cache import Progress, default_cache
from dspark.models.targets.native import compiling

ABI = 1


class NativeUnavailable(Exception):
    """The native backend cannot serve here, or not this model: the reason in one line."""


class Config(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("inner", "vocab", "block_size", "int8", "half_kv")),
        ("threads", c_int32),
        ("norm_eps", c_float),
        ("query_scale", c_float),
        ("kernels", c_char_p),
    ]


LAYER_TENSORS = (
    *("qkv", "qkv_bias", "out", "out_bias", "gate_up", "gate_up_bias", "down", "down_bias"),
    *("attention_norm", "mlp_norm", "q_norm", "k_norm"),
)


class Layer(ctypes.Structure):
    _fields_: ClassVar = [*((name, c_void_p) for name in LAYER_TENSORS), ("window", c_int32)]


class Projection(ctypes.Structure):
    _fields_: ClassVar = [
        ("matrix", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("layers", c_int32),
        ("layer_ids", c_void_p),
        ("out", c_void_p),
    ]


class Batch(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("B", "R", "L", "F", "table_width", "projections")),
        *((name, c_void_p) for name in ("token_ids", "positions", "query_start", "context_len")),
        *((name, c_void_p) for name in ("block_table", "logit_rows", "feature_rows")),
        *((name, c_void_p) for name in ("cos", "sin", "logits")),
        ("projection", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "dn_abi": (c_int, []),
    "dn_source": (c_char_p, []),
    "dn_kernels": (c_char_p, [c_int]),
    "dn_error": (c_char_p, []),
    "dn_create": (c_void_p, [POINTER(Config), c_void_p]),
    "dn_set_layer": (c_int, [c_void_p, c_int, POINTER(Layer)]),
    "dn_set_head": (c_int, [c_void_p] * 4),
    "dn_destroy": (None, [c_void_p]),
    "dn_weights_size": (c_int64, [c_void_p]),
    "dn_weights": (c_void_p, [c_void_p]),
    "dn_map": (c_int, [c_void_p, c_int]),
    "dn_checksum": (c_uint64, [c_void_p, c_void_p, c_int64]),
    "dn_model_kernels": (c_char_p, [c_void_p]),
    "dn_weight_bytes": (c_int64, [c_void_p]),
    "dn_allocate": (c_int, [c_void_p, c_int64]),
    "dn_kv_bytes": (c_int64, [c_void_p]),
    "dn_copy": (None, [c_void_p, c_int64, c_int64]),
    "dn_matrix_create": (c_void_p, [c_void_p, c_void_p, c_int32, c_int32, c_int32]),
    "dn_matrix_destroy": (None, [c_void_p]),
    "dn_multiply": (c_int, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
    "dn_step": (c_int, [c_void_p, POINTER(Batch)]),
    "dn_bandwidth": (c_double, [c_void_p]),
    "dn_arithmetic": (c_double, [c_void_p]),
    "dn_step_products": (c_int, [c_void_p, c_int32, c_int32, c_void_p]),
}


def open_library(path: Path) -> ctypes.CDLL:
    """The library in a file, its functions typed. Raises `NativeUnavailable`."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} is no library of ours: {error}"[:200]) from error
    if library.dn_abi() != ABI:
        raise NativeUnavailable(f"{path} speaks interface {library.dn_abi()}, not {ABI}")
    return library


def load_library(progress: Progress, cache: Path | None = None) -> ctypes.CDLL:
    """The library that was built with the package if it is of this source, else the one in the
    cache, compiled on first use. Raises `NativeUnavailable`."""
    built = Path(__file__).parent / compiling.LIBRARY
    if built.is_file():
        try:
            library = open_library(built)
        except NativeUnavailable as why:
            progress(f"the library that came with the package is not used: {why}")
        else:
            if library.dn_source() == compiling.source_hash().encode():
                return library
    return open_library(cached_library(progress, cache or default_cache()))


def cached_library(progress: Progress, cache: Path) -> Path:
    """Its file below `cache`. Two processes that compile at once both do, and the last stays."""
    compiler = compiling.find_compiler()
    try:
        if compiler is None:
            raise compiling.CannotCompile("no C++ compiler (c++, g++, clang++ or $CXX) was found")
        version = compiling.compiler_version(compiler)
        key = hashlib.blake2b(f"{compiling.source_hash()} {version}".encode(), digest_size=8)
        file = cache / "native" / key.hexdigest() / compiling.LIBRARY
        if file.is_file():
            return file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(file.parent, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise compiling.CannotCompile(
                f"{cache}: the cache cannot be written ({error.strerror}); name another place "
                "with DSPARK_CACHE"
            ) from error
        progress(f"compiling the native kernels with {version} (once)")
        compiling.compile_library(file, compiler)
    except compiling.CannotCompile as error:
        raise NativeUnavailable(str(error)) from error
    return file


def kernel_sets(library: ctypes.CDLL) -> list[str]:
    """Names of the kernel sets that this processor runs, the best first."""
    names: list[str] = []
    while (name := library.dn_kernels(len(names))) is not None:
        names.append(name.decode())
    return names


def best_set(sets: list[str], machine: str) -> str:
    """Of those that run here. Raises `NativeUnavailable` where the machine's kind has better ones,
    since then another backend is faster."""
    if machine == "x86_64" and sets[0] == "portable":
        raise NativeUnavailable("this processor has no AVX2, or the system does not let it be used")
    return sets[0]
