"""What the engine costs and what speculation brings, on the default model; figures as JSON.

    python benchmarks/engine.py added         # what a step adds to the model's forward
    python benchmarks/engine.py paired        # planner on against plain decoding
    python benchmarks/engine.py transformers  # against transformers' generate

Arms alternate within a round, so that drift of a shared machine cancels; figures are ratios of
paired rounds with a bootstrap interval.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
import typer
from rich.console import Console

from dspark.core.config import EngineConfig
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import Loaded, TargetConfig, load, make_engine
from dspark.models import load_target
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler import hardware
from dspark.verifier.engine import Engine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
out = Console(stderr=True, highlight=False)

# Texts to be repeated, our own: what an edit, a quotation or an extraction looks like to a drafter.
REPEATING = [
    "Repeat this text word for word, three times:\n"
    "The harbour master keeps a list of every boat that enters or leaves. Each entry has a name, "
    "a flag, a draught in metres and the hour of arrival. At noon the list is read aloud.",
    "Repeat this program exactly, then repeat it again:\n"
    "def harbour(boats):\n    for boat in boats:\n        if boat.draught > 3.5:\n"
    "            print(boat.name, 'must wait for the tide')\n        else:\n"
    "            print(boat.name, 'may enter')\n    return len(boats)\n",
    "Copy this table three times without changing it:\n"
    "| boat | flag | draught |\n|---|---|---|\n| Alba | Spain | 2.1 |\n| Brise | France | 3.9 |\n"
    "| Carina | Italy | 2.8 |\n| Dagny | Norway | 4.2 |\n| Esme | Ireland | 1.9 |\n",
    "Write this JSON out again, unchanged, four times:\n"
    '{"harbour": "north", "boats": [{"name": "Alba", "draught": 2.1}, '
    '{"name": "Brise", "draught": 3.9}, {"name": "Carina", "draught": 2.8}]}',
]

Prompts = Annotated[
    list[Path] | None,
    typer.Option("--prompts", help='Files of {"prompt": …} lines; default: texts to repeat.'),
]


def facts(loaded: Loaded, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "model": loaded.config.model,
        "dtype": loaded.config.dtype,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def prompt_sets(
    loaded: Loaded, files: Sequence[Path] | None, limit: int
) -> dict[str, list[tuple[int, ...]]]:
    texts = {"repeating": REPEATING}
    if files:
        texts = {f.stem: [json.loads(line)["prompt"] for line in f.open()] for f in files}
    return {
        name: [loaded.tokenizer.chat([{"role": "user", "content": t}]) for t in some[:limit]]
        for name, some in texts.items()
    }


def requests(
    prompts: Sequence[tuple[int, ...]], params: SamplingParams, tag: str = ""
) -> list[Request]:
    return [Request(f"{tag}{i}", ids, params) for i, ids in enumerate(prompts)]


def run(engine: Engine, todo: Sequence[Request], concurrency: int) -> tuple[float, int]:
    """Seconds and committed tokens of a closed loop."""
    waiting = list(reversed(todo))
    begin, tokens = time.perf_counter(), 0
    while waiting or not engine.idle:
        while waiting and engine.active < concurrency:
            engine.submit(waiting.pop())
        for _, event in engine.step():
            tokens += len(event.ids) if isinstance(event, Committed) else 0
    return time.perf_counter() - begin, tokens


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean of paired ratios and its bootstrap 95 % interval (fixed seed)."""
    logs = np.log(np.asarray(ratios))
    rng = np.random.default_rng(0)
    means = rng.choice(logs, (4000, len(logs))).mean(1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return {
        "ratio": round(float(np.exp(logs.mean())), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "pairs": len(ratios),
    }


@app.command()
def added(
    sequences: int = 16,
    steps: int = 60,
    verify: str = "early-stop",
    drafter: str = "ngram",
) -> None:
    """Milliseconds a step that are neither the model's nor the drafter's, at R sequences."""
    loaded = load(
        TargetConfig(drafter=drafter, engine=EngineConfig(kv_tokens=16_384, verify=verify))
    )
    prompt = loaded.tokenizer.chat([{"role": "user", "content": REPEATING[0]}])
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8 * steps + 64)
    warm = replace(greedy, temperature=0.8)
    kinds = {
        "greedy": greedy,
        "top_p": replace(warm, top_p=0.9),
        "penalties": replace(greedy, repetition_penalty=1.2, presence_penalty=0.5),
        "seeded": replace(warm, seed=1),
        "unseeded": warm,
        "logprobs": replace(greedy, logprobs=True, top_logprobs=5),
    }
    engine, figures, rows = loaded.engine, loaded.engine.figures, {}
    for kind, params in kinds.items():
        prompts = [(*prompt, 100 + i) for i in range(sequences)]
        for request in requests(prompts, params, kind):
            engine.submit(request)
        while figures.speculation.rounds == 0 or any(
            s.state.uncomputed > 1 for s in engine.running
        ):
            engine.step()
        each = []
        for _ in range(steps):
            before = figures.added_s
            engine.step()
            each.append(1e3 * (figures.added_s - before))
        rows[kind] = {
            "median_ms": round(float(np.median(each)), 3),
            "p10_ms": round(float(np.quantile(each, 0.1)), 3),
            "p90_ms": round(float(np.quantile(each, 0.9)), 3),
        }
        out.print(kind, rows[kind])
        for request in requests(prompts, params, kind):
            engine.cancel(request.request_id)
        engine.step()
    print(json.dumps({**facts(loaded, "added"), "sequences": sequences, "added": rows}))


@app.command()
def paired(
    prompts: Prompts = None,
    concurrency: str = "1,4,16",
    rounds: int = 8,
    limit: int = 8,
    max_tokens: int = 96,
    verify: str = "early-stop",
    gamma: int = 7,
    dtype: str = "float32",
) -> None:
    """Tokens/s with ngram and the planner over plain decoding, paired round by round."""
    config = TargetConfig(dtype=dtype, engine=EngineConfig(verify=verify, gamma=gamma))
    loaded = load(config)
    arms = {"speculating": loaded.engine, "plain": _second(loaded, "none")}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    results = []
    at_once_all = [int(text) for text in concurrency.split(",")]
    for name, some in prompt_sets(loaded, prompts, max(limit, *at_once_all)).items():
        for at_once in at_once_all:
            # As many prompts as run at once, or the last ones would run alone.
            ids = [some[i % len(some)] for i in range(max(limit, at_once))]
            ratios = []
            for i in range(rounds + 1):
                speed = {}
                for arm in sorted(arms, reverse=bool(i % 2)):
                    # A first token of its own keeps the prefix cache out of the comparison.
                    heads = range(1000 + i * len(ids), 1000 + (i + 1) * len(ids))
                    todo = requests([(h, *p) for h, p in zip(heads, ids, strict=True)], params)
                    seconds, tokens = run(arms[arm], todo, at_once)
                    speed[arm] = tokens / seconds
                if i:  # the first round warms up
                    ratios.append(speed["speculating"] / speed["plain"])
            row = {"prompts": name, "concurrency": at_once, **interval(ratios)}
            out.print(row, {arm: round(v, 1) for arm, v in speed.items()})
            results.append(row)
    figures = loaded.engine.figures.speculation
    print(
        json.dumps(
            {
                **facts(loaded, "paired"),
                "verify": verify,
                "gamma": gamma,
                "accepted_length": round(figures.accepted_length, 3),
                "results": results,
            }
        )
    )


def _second(loaded: Loaded, drafter: str) -> Engine:
    """Another engine over weights of its own, so that neither arm warms the other's caches."""
    model = load_target(
        loaded.path, dtype=getattr(torch, loaded.config.dtype), device=loaded.config.device
    )
    backend = TransformersBackend(model, loaded.config.engine.block_size)
    config = replace(loaded.config, drafter=drafter)
    return make_engine(backend, config, loaded.cost, loaded.tokenizer.eos_ids)


@app.command()
def transformers(
    prompts: Prompts = None, rounds: int = 6, limit: int = 6, max_tokens: int = 96
) -> None:
    """Tokens/s at concurrency 1 over transformers' generate, its prompt lookup and assistance.

    The assistant is the target's own first ten layers: there is no smaller model of this
    vocabulary here.
    """
    loaded = load(TargetConfig())
    plain = _second(loaded, "none")
    theirs: Any = load_target(loaded.path, dtype=torch.float32, device="cpu")
    assistant: Any = load_target(loaded.path, dtype=torch.float32, device="cpu")
    assistant.model.layers = assistant.model.layers[:10]
    assistant.config.num_hidden_layers = 10

    def generate(ids: tuple[int, ...], **options: Any) -> int:
        whole = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **options,
        )
        return int(whole.shape[1]) - len(ids)

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def ours(engine: Engine) -> Callable[[tuple[int, ...]], int]:
        return lambda ids: run(engine, requests([ids], params), 1)[1]

    arms: dict[str, Callable[[tuple[int, ...]], int]] = {
        "generate": generate,
        "prompt lookup": lambda ids: generate(ids, prompt_lookup_num_tokens=7),
        "assisted": lambda ids: generate(ids, assistant_model=assistant),
        "dspark plain": ours(plain),
        "dspark ngram": ours(loaded.engine),
    }
    results = []
    for name, some in prompt_sets(loaded, prompts, limit).items():
        speeds: dict[str, list[float]] = {arm: [] for arm in arms}
        for i in range(rounds + 1):
            for arm in list(arms)[:: 1 if i % 2 else -1]:
                begin = time.perf_counter()
                tokens = sum(arms[arm]((1000 + i, *ids)) for ids in some)
                if i:
                    speeds[arm].append(tokens / (time.perf_counter() - begin))
        for ours_arm, their_arm in (
            ("dspark plain", "generate"),
            ("dspark ngram", "generate"),
            ("dspark ngram", "prompt lookup"),
            ("dspark ngram", "assisted"),
        ):
            pairs = [a / b for a, b in zip(speeds[ours_arm], speeds[their_arm], strict=True)]
            row = {"prompts": name, "ours": ours_arm, "theirs": their_arm, **interval(pairs)}
            out.print(row)
            results.append(row)
        medians = {arm: round(float(np.median(values)), 1) for arm, values in speeds.items()}
        out.print(medians)
        results.append({"prompts": name, "median_tokens_per_s": medians})
    print(json.dumps({**facts(loaded, "transformers"), "results": results}))


if __name__ == "__main__":
    app()
