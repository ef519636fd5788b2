"""The central plan against verifiers that plan by themselves, on real processes (a short run of
`benchmarks/central_gain.py`, which says what is compared)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "central_gain.py"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tenants", "drafter"])
async def test_together_they_serve_a_tenth_more(case: str) -> None:
    arguments = ("--case", case, "--pairs", "2", "--seconds", "10", "--settle", "12")
    pipe = asyncio.subprocess.PIPE
    script = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, *arguments, stdout=pipe)
    try:
        async with asyncio.timeout(240.0):
            told, _ = await script.communicate()
    finally:
        if script.returncode is None:
            script.terminate()
            await script.wait()
    assert script.returncode == 0
    found = json.loads(told)
    assert found["gain"]["median"] >= 1.1
    if case == "tenants":
        rates = found["tokens_s"]["central"]
        assert rates["a"] / rates["b"] == pytest.approx(3.0, rel=0.15)
