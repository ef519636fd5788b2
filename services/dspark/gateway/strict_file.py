"""A file that people write, YAML or JSON, into a model of pydantic's: what it does not know is an
error that names the file and the field, and no error shows a value (it may be a secret)."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.core.errors import ConfigError


class Strict(BaseModel):
    """No unknown field, no value that is nearly of the right type, no change afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Strict)


def read_strict(path: Path, model: type[Model]) -> Model:
    """JSON if the file's name ends so, else YAML. Raises `ConfigError`."""
    try:
        return model.model_validate(_read(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {told(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def told(error: ValidationError) -> str:
    """What is wrong, field by field; a value only where it is a number beyond a limit."""
    return "; ".join(map(_told, error.errors(include_url=False)))


_LIMITS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def _told(problem: Any) -> str:
    where = ".".join(map(str, problem["loc"])) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where}: is not a known field"
    if problem["type"] in _LIMITS:  # of the right type, so no secret in the wrong place
        return f"{where}: {problem['msg']}, not {problem['input']}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_without_twins)
        return yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(error.strerror or "cannot be read") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno}: is not JSON") from None
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line
        raise ConfigError(f"line {line + 1}: is not YAML") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ConfigError("is not a text file") from None


def _without_twins(pairs: Iterable[tuple[Hashable, Any]]) -> dict[Hashable, Any]:
    """Of two fields of one name both formats would keep the last and say nothing."""
    found: dict[Hashable, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{name}: is given twice")
        found[name] = value
    return found


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [self.construct_object(name, deep=True) for name, _ in node.value]
        _without_twins((name, None) for name in names if isinstance(name, Hashable))
        return super().construct_mapping(node, deep)
