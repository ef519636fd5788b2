"""Several workers on Ray Train, which walk the path of one.

Each takes its part of every batch and divides by the weights of the whole batch, so summed
gradients are those of one worker (`exchange.py`); parameters stay equal without being sent.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError, DsparkError
from dspark.training.config import TrainConfig
from dspark.training.distant_watch import following, telling
from dspark.training.errors import DataError
from dspark.training.training_run import Outcome, Watch
from dspark.training.whole_files import read_json, write_json


def train_on_ray(
    config: TrainConfig,
    workers: int,
    *,
    threads: int = 0,
    stop_at: int | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """`train` in `workers` processes of one cluster, the one that runs or one of this machine.

    The working directory, the run's folder and the data's have to be reachable by every worker
    under the same path.
    threads: of each worker, 0 for an equal share of the cores. watch: hears what the first worker
    tells, a little later and in a thread of its own. Raises what `train` raises.
    """
    if config.training.sequences < workers:
        raise ConfigError(
            f"training.sequences: {config.training.sequences} a step are not enough for "
            f"{workers} workers"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    except ImportError:
        raise ConfigError("workers: needs Ray: pip install 'dspark[train]'") from None
    room = Path(config.run.folder).absolute() / "ray"
    outcome, told_file = room / "outcome.json", room / "told.jsonl"
    outcome.unlink(missing_ok=True)
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        trainer = TorchTrainer(
            _work,
            train_loop_config={
                "config": config.model_dump(mode="json"),
                "folder": os.getcwd(),
                "threads": threads or max((os.cpu_count() or 1) // workers, 1),
                "stop_at": stop_at,
                "outcome": str(outcome),
                "told": str(told_file),
            },
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
            run_config=RunConfig(storage_path=str(room)),
        )
        with following(told_file, watch or Watch()):
            trainer.fit()
    except TrainingFailedError as error:
        raise _ours(error) from None
    finally:
        if started:
            ray.shutdown()
    told = read_json(outcome)
    return Outcome(told["step"], Path(told["drafter"]), told["held_out"], told["spent"])


def _work(told: dict[str, Any]) -> None:
    """In each worker, whose process group Ray has set up (gloo)."""
    import torch

    from dspark.training.exchange import ProcessGroup
    from dspark.training.training_run import train

    os.chdir(told["folder"])  # Ray starts workers elsewhere; paths are relative to here
    torch.set_num_threads(told["threads"])
    config = TrainConfig.model_validate(told["config"])
    exchange = ProcessGroup()
    watch = telling(Path(told["told"])) if exchange.rank == 0 else None
    found = train(config, watch=watch, exchange=exchange, stop_at=told["stop_at"])
    if exchange.rank == 0:
        facts = {**asdict(found), "drafter": str(found.drafter)}
        write_json(Path(told["outcome"]), facts)


def _ours(error: BaseException) -> DsparkError:
    """The worker's own error, if Ray wrapped one of ours."""
    left: list[Any] = [error]
    while left:
        one = left.pop()
        if isinstance(one, DsparkError):
            return one
        inner = [one.__cause__, getattr(one, "cause", None)]
        inner += getattr(one, "worker_failures", {}).values()
        left += [each for each in inner if isinstance(each, BaseException)]
    return DataError(f"a worker failed: {str(error).strip().splitlines()[-1]}")
