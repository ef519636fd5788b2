"""A simulation's TOML file, read strictly. It names a `preset`, or says everything itself; a table
that it gives replaces the preset's."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError
from dspark.scheduler.simulation.config import SimulationConfig
from dspark.scheduler.simulation.presets import preset_table, step_cost_named
from dspark.scheduler.simulation.strict import build
from dspark.scheduler.step_cost import StepCost


def read_config(path: Path) -> SimulationConfig:
    """Raises `ConfigError` naming the file and the field. Paths in it are relative to it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    try:
        return config_of(table, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_of(table: Mapping[str, Any], folder: Path = Path()) -> SimulationConfig:
    """From a file's table. `policies = ["none", "top-k"]` is short for arms of that name."""
    whole = dict(table)
    if isinstance(name := whole.get("preset"), str):
        whole = {**preset_table(name), **whole}
    if "policies" in whole:
        if "arms" in table:
            raise ConfigError("policies: may not stand beside arms, which say the same")
        policies = whole.pop("policies")
        if not isinstance(policies, list):
            raise ConfigError(f"policies: {policies!r:.40} must be a list")
        whole["arms"] = [{"policy": policy} for policy in policies]
    config = build(SimulationConfig, whole)
    costs = [
        replace(kind, step_cost=_cost(kind.step_cost, folder, f"verifiers[{i}].step_cost"))
        for i, kind in enumerate(config.verifiers)
    ]
    return replace(config, verifiers=tuple(costs))


def _cost(source: str | StepCost, folder: Path, at: str) -> StepCost:
    if isinstance(source, StepCost):
        return source
    if (cost := step_cost_named(source)) is not None:
        return cost
    try:
        return StepCost.load(folder / source)
    except OSError as error:
        raise ConfigError(
            f"{at}: {source!r:.80} is no preset, and as a file: {error.strerror}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None
