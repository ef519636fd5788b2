"""The constants of `dspark.scheduler.simulation.presets`: fitted, never tuned.

    python benchmarks/fit_presets.py

Step costs are fitted to the paper's MTP-1 points and to nothing else. A point says what R requests
get of a GPU, so how long their step of B = 2R tokens takes: T = τ R / throughput, where τ = 1 + p
and p is the acceptance of one draft token. Acceptance is of Table 1, the spread of it of Figure 6.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from dspark.scheduler.simulation.presets import PAPER, Curve, Paper

FloatArray = NDArray[np.float64]

# Table 1, DSpark on Qwen3-4B, γ = 7, temperature 1, whole blocks verified: τ by benchmark.
TABLE1 = {
    "math": (6.11, 5.70, 4.89),  # GSM8K, MATH, AIME25
    "code": (5.13, 5.38, 4.86),  # MBPP, HumanEval, LiveCodeBench
    "chat": (3.64, 3.54, 3.29),  # MT-Bench, Alpaca, Arena-Hard
}
GAMMA = 7
# Figure 6: area under the curve of the confidence of position 1.
AUC = 0.818


def acceptance(tau: float, gamma: int) -> float:
    """p with (1 − p^(γ+1)) / (1 − p) = τ, by bisection."""
    low, high = 0.0, 1.0 - 1e-12
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if (1 - p ** (gamma + 1)) / (1 - p) < tau else (low, p)
    return low


def area(mean: float, total: float) -> float:
    """How well θ ~ Beta(mean·total, (1 − mean)·total) tells what stands: P(θ of one that stood is
    above θ of one that fell). Of those that stood θ ~ Beta(a + 1, b), of the others Beta(a, b + 1).
    """
    rng = np.random.default_rng(0)
    a, b = mean * total, (1 - mean) * total
    stood, fell = np.sort(rng.beta(a + 1, b, 200_000)), rng.beta(a, b + 1, 200_000)
    return float(1 - np.searchsorted(stood, fell).mean() / len(stood))


def spread(mean: float, auc: float) -> float:
    """Standard deviation of θ at which its area is `auc`."""
    low, high = 1e-3, 1e3
    for _ in range(40):
        total = np.sqrt(low * high)
        low, high = (total, high) if area(mean, float(total)) > auc else (low, total)
    return float(np.sqrt(mean * (1 - mean) / (np.sqrt(low * high) + 1)))


def points(paper: Paper, tau: float) -> tuple[FloatArray, FloatArray]:
    """B and T of every MTP-1 point."""
    users = [throughput / tps for tps, throughput in paper.mtp1_speed]
    seconds = [tau / tps for tps, _ in paper.mtp1_speed]
    users += [R for R, _ in paper.mtp1_load]
    seconds += [tau * R / throughput for R, throughput in paper.mtp1_load]
    return 2 * np.array(users), np.array(seconds)


def fit(tokens: FloatArray, seconds: FloatArray) -> tuple[Curve, FloatArray]:
    """Least squares of T in relative error, nothing below 0; and the relative errors."""
    best, least = Curve(1.0, 0.0, 1.0, 0.0), np.inf
    for e in np.exp2(np.linspace(0, 12, 481)).tolist():
        columns = [np.ones(len(tokens)), -np.expm1(-tokens / e), tokens]
        parts = np.stack(columns, axis=1) / seconds[:, None]
        for n in (1, 2, 3):
            for chosen in map(list, itertools.combinations(range(3), n)):
                s = np.zeros(3)
                s[chosen] = np.linalg.lstsq(parts[:, chosen], np.ones(len(tokens)), rcond=None)[0]
                error = float(np.sum((parts @ s - 1) ** 2))
                if (s >= 0).all() and error < least:
                    least, best = error, Curve(float(s[0]), float(s[1]), e, float(s[2]))
    return best, np.array([best.seconds(B) for B in tokens]) / seconds - 1


def main() -> None:
    means = {name: acceptance(float(np.mean(tau)), GAMMA) for name, tau in TABLE1.items()}
    for name, p in means.items():
        print(f"{name}: acceptance {p:.4f}, spread {spread(p, AUC):.4f}")
    # Users are a third of each kind by requests; slow kinds take longer: the harmonic mean.
    tau = 3 / sum(1 / (1 + p) for p in means.values())
    print(f"MTP-1: τ {tau:.4f}")
    for name, paper in PAPER.items():
        curve, errors = fit(*points(paper, tau))
        print(f"{name}: {curve}")
        print(
            f"  relative error of the {len(errors)} points: root mean square "
            f"{np.sqrt(np.mean(errors**2)):.3f}, largest {np.abs(errors).max():.3f}"
        )


if __name__ == "__main__":
    main()
