"""Whether a new drafter finds its context after it has taken an old one's place, under load.

    python -m benchmarks.checkpoint_swap [--backend native --dtype float32] [--drafter auto|DIR]
        [--users 8] [--turns 4]

Real processes: a scheduler, a gateway, a verifier and a drafter. Users hold conversations of twice
`turns` turns, greedy, so that each request's prompt is in the prefix cache up to its last question;
whole blocks are verified. After half of the turns, without a pause, another drafter process starts
and the old one is told to leave. The new checkpoint is the old one with a projection that is wrong
by one part in a thousand: as good a drafter, but features of another version, so what the prefix
cache holds of the old one's is of no use to it. τ of the second half is set against the same turns
of a cluster that had the new drafter from the start: greedy answers are the same ones. JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from tests.deploy.processes import Processes, cluster

from dspark.client import AsyncClient, Generation
from dspark.core.requests import SpeculationFigures
from dspark.models import resolve
from dspark.models.drafters.checkpoint import load_checkpoint, save_checkpoint
from dspark.models.drafters.shipped import chosen_drafter
from dspark.models.drafters.target_tensors import TargetTensors

from .cluster_faults import PROMPTS, user_cache

MODEL = "smollm2-135m"
QUESTIONS = ["Go on.", "Why?", "Say that in other words.", "Give an example.", "And then?"]
WRONG = 1e-3

Message = dict[str, str]


def other_checkpoint(old: str, directory: Path) -> Path:
    """Another version that drafts as well."""
    checkpoint = load_checkpoint(Path(old), TargetTensors.read(resolve(MODEL)))
    with torch.no_grad():
        weight = checkpoint.model.get_parameter("fc.weight")
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight += WRONG * weight.std() * noise
    save_checkpoint(directory, checkpoint.model, checkpoint.target)
    return directory


async def converse(
    client: AsyncClient, talks: list[list[Message]], turn: int, tokens: int
) -> list[Generation]:
    """A turn of all users at once."""
    answers = await asyncio.gather(
        *(client.chat(talk, max_tokens=tokens, temperature=0.0) for talk in talks)
    )
    for user, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
        question = QUESTIONS[(turn + user) % len(QUESTIONS)]
        talk.append({"role": "assistant", "content": answer.text})
        talk.append({"role": "user", "content": question})
    return answers


def with_drafter(file: Path, checkpoint: Path | str) -> None:
    told = yaml.safe_load(file.read_text())
    told["drafter"]["checkpoint"] = str(checkpoint)
    file.write_text(yaml.safe_dump(told))


async def talk(processes: Processes, later: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All turns; after half of them the drafter `later` takes over from the first."""
    processes.start_all("scheduler", "verifier")
    old = processes.start("drafter")
    gateway = processes.start("gateway")
    talks: list[list[Message]] = [
        [{"role": "user", "content": PROMPTS[user % len(PROMPTS)]}] for user in range(args.users)
    ]
    turns = []

    async def swap() -> None:
        with_drafter(processes.file, later)
        await asyncio.to_thread(processes.start, "drafter")
        old.process.terminate()
        await asyncio.to_thread(old.ended)

    async with AsyncClient([gateway.address]) as client:
        while not summary(await converse(client, [talks[0][:1]], 0, 8))["accepted"]:
            pass  # until the verifier has found its drafter
        for turn in range(2 * args.turns):
            under_way = asyncio.create_task(swap()) if turn == args.turns else None
            answers = await converse(client, talks, turn, args.tokens)
            if under_way is not None:
                await under_way
            turns.append(summary(answers))
            print(turns[-1], file=sys.stderr)
    texts = [[m["content"] for m in talk if m["role"] == "assistant"] for talk in talks]
    return {"turns": turns, "texts": texts}


def summary(answers: list[Generation]) -> dict[str, float]:
    choices = [answer.choices[0] for answer in answers]
    figures = sum((c.speculation for c in choices), SpeculationFigures())
    prompts = sum(c.usage.prompt_tokens for c in choices)
    return {
        "cached": round(sum(c.usage.cached_tokens for c in choices) / prompts, 3),
        "rounds": figures.rounds,
        "accepted": figures.accepted,
        "tau": round(figures.accepted_length, 3),
    }


def tau(turns: list[Mapping[str, float]]) -> float:
    return 1 + sum(t["accepted"] for t in turns) / sum(t["rounds"] for t in turns)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    old = chosen_drafter(args.drafter, MODEL)
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dspark-swap-") as folder:
        new = other_checkpoint(old, Path(folder) / "new")
        for name, first, later in (("swapped", old, new), ("new from the start", new, new)):
            engine = {"kv_tokens": 32_768, "max_sequences": args.users, "verify": "fixed:6"}
            sections: dict[str, Any] = {
                "backend": args.backend,
                "dtype": args.dtype,
                "verifier": {"replicas": 1, "threads": 1, "engine": engine},
                "drafter": {"replicas": 2, "threads": 1, "checkpoint": str(first)},
            }
            directory = Path(folder) / name.replace(" ", "-")
            with cluster(directory, Path(MODEL), environment=user_cache(), **sections) as made:
                told[name] = asyncio.run(talk(made, later, args))
    texts = [told[name].pop("texts") for name in ("swapped", "new from the start")]
    pairs = zip(*texts, strict=True)
    half = [tau(told[name]["turns"][args.turns :]) for name in told]
    return {
        **told,
        "answers_that_differ": sum(
            a != b for one, other in pairs for a, b in zip(one, other, strict=True)
        ),
        "tau_before": round(tau(told["swapped"]["turns"][: args.turns]), 3),
        "tau_after": round(half[0], 3),
        "tau_new_from_the_start": round(half[1], 3),
        "ratio": round(half[0] / half[1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="native")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4, help="before the swap, and after it")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
