"""Tables of a TOML file into frozen dataclasses, strictly: an unknown name, a wrong type or a value
out of its range is a `ConfigError` that names the field by its path, as in `domains[1].spread`."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dspark.core.errors import ConfigError

T = TypeVar("T")

_TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def number(
    default: Any = MISSING,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
) -> Any:
    """A dataclass field of a number (or a list of numbers) in [least, most] and above `above`."""
    limits = {"least": least, "most": most, "above": above}
    return field(metadata=limits) if default is MISSING else field(default=default, metadata=limits)


def choice(default: str, *names: str) -> Any:
    """A dataclass field of one of these words; the default is one too."""
    return field(default=default, metadata={"names": (default, *names)})


def build(kind: type[T], table: object, at: str = "") -> T:
    """A dataclass from a table. What `kind` itself refuses is named by its path too."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{at or 'the file'}: must be a table, not {table!r:.40}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise ConfigError(
                f"{_path(at, name)}: is not a known field; known are {', '.join(known)}"
            )
    hints = get_type_hints(kind)
    values = {
        name: _read(hints[name], known[name], value, _path(at, name))
        for name, value in table.items()
    }
    for name, spec in known.items():
        optional = spec.default is not MISSING or spec.default_factory is not MISSING
        if name not in table and not optional:
            raise ConfigError(f"{_path(at, name)}: is missing")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(_path(at, str(error))) from None


def _path(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _read(hint: Any, spec: Field[Any], value: object, path: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        fitting = [kind for kind in kinds if _fits(kind, value)]
        if not fitting:
            told = " or ".join(map(_told, kinds))
            raise ConfigError(f"{path}: {value!r:.40} must be {told}")
        hint = fitting[0]
    if not _fits(hint, value):
        raise ConfigError(f"{path}: {value!r:.40} must be {_told(hint)}")
    if get_origin(hint) is tuple:
        assert isinstance(value, list)
        inner = get_args(hint)[0]
        return tuple(_read(inner, spec, item, f"{path}[{i}]") for i, item in enumerate(value))
    if hint not in _TYPES:
        return build(hint, value, path)
    _check(spec.metadata, value, path)
    return float(value) if hint is float else value  # type: ignore[arg-type]


def _fits(hint: Any, value: object) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, list)
    if hint in (int, float):
        number = isinstance(value, int) or (hint is float and isinstance(value, float))
        return number and not isinstance(value, bool)
    return isinstance(value, hint if hint in _TYPES else Mapping)


def _told(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return "a list"
    return _TYPES.get(hint, "a table")


def _check(limits: Mapping[str, Any], value: Any, path: str) -> None:
    if "names" in limits and value not in limits["names"]:
        raise ConfigError(f"{path}: {value!r:.40} must be one of {', '.join(limits['names'])}")
    if "least" not in limits or isinstance(value, (str, bool)):
        return
    least, most, above = limits["least"], limits["most"], limits["above"]
    if not math.isfinite(value):
        raise ConfigError(f"{path}: {value!r} must be a finite number")
    if value <= above:
        raise ConfigError(f"{path}: {value!r} must be above {above:g}")
    if not least <= value <= most:
        limit = f"at least {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"
        raise ConfigError(f"{path}: {value!r} must be {limit}")
