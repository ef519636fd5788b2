"""`dspark train`: a run from where it stands to its last step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.core.errors import ModelError
from dspark.models.drafters.checkpoint import load_checkpoint
from dspark.models.drafters.trunk import TARGET_TENSORS, Trunk
from dspark.training.config import TrainConfig
from dspark.training.curve import Curve
from dspark.training.errors import DataError, TrainingStopped
from dspark.training.exchange import Alone, Exchange
from dspark.training.run_state import RunState, load_optimizer, save_state, states
from dspark.training.start import Data, TargetModel, first_drafter, open_data
from dspark.training.trainer import StepReport, Trainer

# Of the settings that are kept those the curve does not depend on: a run that was killed for memory
# goes on with less of it, and on another device.
_CHANGEABLE = {"training.together", "training.chunk_rows", "training.device"}


@dataclass(frozen=True, slots=True)
class Watch:
    """Where a run reports: sentences, steps, held-out figures."""

    line: Callable[[str], None] = lambda _: None
    step: Callable[[StepReport], None] = lambda _: None
    held_out: Callable[[int, dict[str, Any]], None] = lambda _step, _figures: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """drafter: folder of the last checkpoint's drafter. held_out: its figures. spent: block tokens
    ("tokens"), "flops" and "seconds" of all steps so far, whatever process they were in."""

    step: int
    drafter: Path
    held_out: dict[str, Any]
    spent: dict[str, float]


def train(
    config: TrainConfig,
    *,
    watch: Watch | None = None,
    exchange: Exchange | None = None,
    stop_at: int | None = None,
) -> Outcome:
    """Train to the configured step (or to `stop_at`), going on from the run's last checkpoint.

    With several workers each calls this with its own `exchange`; the first one writes.
    Raises ConfigError, DataError, ModelError, and TrainingStopped for a loss that is no number,
    which names the checkpoint that is left.
    """
    watch, exchange = watch or Watch(), exchange or Alone()
    run, writes = Path(config.run.folder), exchange.rank == 0
    target = TargetModel.find(config.target)
    data = open_data(config, target)
    facts = {"config": _settings(config)}
    last = _last(run, facts)
    model, trainer = _resume(config, data, target, last, exchange, watch)
    target_facts = target.facts(data.facts)
    curve = Curve(run, trainer.step, tensorboard=config.run.tensorboard) if writes else None
    held_out: dict[str, Any] = {}
    spent = dict(last.facts["spent"]) if last else dict.fromkeys(("tokens", "flops", "seconds"), 0)

    def evaluate() -> dict[str, Any]:
        some = data.held_out[: config.run.evaluate_sequences]
        figures = trainer.held_out(some) if some else {}
        if curve is not None and figures:
            curve.add(trainer.step, "held_out", figures)
            watch.held_out(trainer.step, figures)
        return figures

    def keep() -> RunState | None:
        trainer.check_parameters()
        if not writes:
            return None
        training = {"step": trainer.step, "held_out": held_out, "spent": spent, **facts}
        return save_state(
            run,
            trainer.step,
            model,
            trainer.optimizer,
            target_facts,
            {**facts, "spent": spent},
            training,
            keep=config.run.keep,
        )

    end = config.training.steps if stop_at is None else min(stop_at, config.training.steps)
    try:
        while trainer.step < end:
            report = trainer.advance()
            spent["tokens"] += report.block_tokens
            spent["flops"] += report.flops
            spent["seconds"] += report.seconds
            watch.step(report)
            at_end = trainer.step == config.training.steps
            if curve is not None and (at_end or trainer.step % config.run.log_steps == 0):
                curve.add(trainer.step, "train", _logged(report))
            if at_end or trainer.step % config.run.evaluate_steps == 0:
                held_out = evaluate()
            if at_end or trainer.step % config.run.checkpoint_steps == 0:
                last = keep() or last
    except TrainingStopped as error:
        left = (
            f"the last good checkpoint is {last.folder}" if last else "there is no checkpoint yet"
        )
        raise TrainingStopped(f"{error}; {left}") from None
    finally:
        if curve is not None:
            curve.close()
    drafter = last.drafter if last is not None else run
    return Outcome(trainer.step, drafter, held_out, spent)


def _resume(
    config: TrainConfig,
    data: Data,
    target: TargetModel,
    last: RunState | None,
    exchange: Exchange,
    watch: Watch,
) -> tuple[Trunk, Trainer]:
    if last is None:
        model, coverage = first_drafter(config, data, target)
        watch.line(
            f"{len(data.train)} answers to train on, {len(data.held_out)} held out; "
            f"{_count(model):,} parameters; its vocabulary covers {100 * coverage:.2f} % of the "
            "answers"
        )
    else:
        try:
            model = load_checkpoint(last.drafter, target.tensors).model
        except ModelError as error:
            raise DataError(
                f"{error}; delete {last.folder} to go on from the one before"
            ) from error
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in TARGET_TENSORS)
        watch.line(f"going on after step {last.step} of {config.training.steps}")
    model.to(config.training.device).train()
    trainer = Trainer(
        model,
        data.source,
        data.train,
        config.training,
        config.weights,
        balance=config.data.balance,
        exchange=exchange,
        step=0 if last is None else last.step,
    )
    if last is not None:
        load_optimizer(last, model, trainer.optimizer)
    return model, trainer


def _last(run: Path, facts: dict[str, Any]) -> RunState | None:
    """The newest checkpoint. Raises DataError if it is of a run with other settings."""
    found = states(run)
    if not found:
        return None
    last = found[-1]
    held = _flat(last.facts.get("config", {}))
    asked = _flat(facts["config"])
    for name in sorted({*held, *asked} - _CHANGEABLE):
        if held.get(name) != asked.get(name):
            raise DataError(
                f"{run}: was begun with {name} = {held.get(name)!r}, now it is "
                f"{asked.get(name)!r}; go on with the same, or choose another folder"
            )
    return last


def _settings(config: TrainConfig) -> dict[str, Any]:
    """What is kept of a configuration: not where and how often it is written, nor the workers."""
    return config.model_dump(mode="json", exclude={"run": True})


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _logged(report: StepReport) -> dict[str, Any]:
    return {
        **report.figures,
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "block_tokens": report.block_tokens,
        "seconds": round(report.seconds, 4),
    }


def _count(model: Trunk) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
