"""Drafters of every kind, trained alike and judged alike (the paper's Table 1, on a small machine).

    python benchmarks/compare_drafters.py --eval DIR [--base examples/train/smollm2-135m.toml]
        [--folder .state/compare] [--steps 2000] [--only dspark,dflash] [--threads 2]

Each kind is trained by `dspark train` from the base configuration: the same answers, the same
anchors, so the same supervised positions (mtp: the first of each block), as many steps; then
`dspark eval` verifies every block whole at temperature 0 and 1. What is done stays done: the same
command goes on where it was ended. Prints seconds, TFLOP and τ by domain.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "dspark": {"kind": "dspark", "head": "vanilla", "layers": 2},
    "dspark-all-ids": {"kind": "dspark", "head": "vanilla", "layers": 2, "draft_vocab": 0},
    "dspark-5": {"kind": "dspark", "head": "vanilla", "layers": 5},
    "dspark-rnn": {"kind": "dspark", "head": "rnn", "layers": 2},
    "dflash": {"kind": "dflash", "layers": 2},
    "dflash-5": {"kind": "dflash", "layers": 5},
    "eagle3": {"kind": "eagle3", "layers": 1},
    "mtp": {"kind": "mtp", "layers": 1},
}
COMMAND = [sys.executable, "-c", "import sys; from dspark.cli.main import main; sys.exit(main())"]
DOMAINS = ("math", "code", "chat")


def configuration(base: dict[str, Any], kind: str, steps: int, run: Path) -> dict[str, Any]:
    """The base's, with another drafter, as many steps and a folder of its own."""
    return base | {
        "drafter": base["drafter"] | KINDS[kind],
        "training": base["training"] | {"steps": steps},
        "run": {"folder": str(run), "evaluate_steps": max(steps // 5, 1), "keep": 1},
    }


def toml(sections: dict[str, Any]) -> str:
    """Of one level of sections; JSON's plain values are TOML's."""
    lines = [f"{k} = {json.dumps(v)}" for k, v in sections.items() if not isinstance(v, dict)]
    for name, section in sections.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    return "\n".join(lines) + "\n"


def trained(base: dict[str, Any], kind: str, asked: argparse.Namespace) -> Path:
    """The folder of the last step's drafter."""
    run = asked.folder / kind
    file = asked.folder / f"{kind}.toml"
    asked.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(toml(configuration(base, kind, asked.steps, run)), encoding="utf-8")
    command = [*COMMAND, "train", "--config", str(file), "--threads", str(asked.threads)]
    subprocess.run(command, check=True)
    return Path(run / f"state-{asked.steps:08d}" / "drafter")


def judged(drafter: Path, kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The result of `dspark eval`."""
    file = asked.folder / f"{kind}-{asked.steps}.json"
    if not file.is_file():
        command = [*COMMAND, "eval", "--drafter", str(drafter), "--prompts", str(asked.eval)]
        command += ["--limit", str(asked.limit), "--backend", asked.backend, "--name", kind]
        command += ["--threads", str(asked.threads), "--output", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def row(kind: str, drafter: Path, result: dict[str, Any]) -> str:
    training = json.loads((drafter / "config.json").read_text(encoding="utf-8"))["training"]
    spent = training["spent"]
    cells = [kind, f"{spent['seconds'] / 60:.1f}", f"{spent['flops'] / 1e12:,.0f}"]
    for heat in result["temperatures"]:
        cells += [f"{heat['domains'][d]['tau']:.3f}" for d in DOMAINS]
    cold = result["temperatures"][0]["all"]
    cells.append(" ".join(f"{x:.2f}" for x in cold["acceptance_by_position"]))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eval", type=Path, required=True, help="folder of *.jsonl benchmarks")
    parser.add_argument("--base", type=Path, default=Path("examples/train/smollm2-135m.toml"))
    parser.add_argument("--folder", type=Path, default=Path(".state/compare"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, separated by commas")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each benchmark")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    kinds = asked.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only: {min(unknown)!r} is not one of: {', '.join(KINDS)}")
    base = tomllib.loads(asked.base.read_text(encoding="utf-8"))
    rows = []
    for kind in kinds:
        drafter = trained(base, kind, asked)
        rows.append(row(kind, drafter, judged(drafter, kind, asked)))
    heads = [f"{d}, T {heat}" for heat in (0, 1) for d in DOMAINS]
    print("| kind | minutes | TFLOP | " + " | ".join(heads) + " | acceptance by position, T 0 |")
    print("|" + "---|" * (len(heads) + 4))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
