"""A KV cache beyond the memory there is, found at the start. Files stand in for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError
from dspark.deploy.memory import check_kv_tokens, free_bytes

MACHINE = 8_000 * 1024


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """8,000 kB are available on it; `groups` is what /proc/self/cgroup says."""
    meminfo = "MemTotal:       16000 kB\nMemFree:         100 kB\nMemAvailable:    8000 kB\n"
    for name, text in {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, MACHINE),
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, MACHINE),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        (  # files' cache goes when room is wanted
            "0::/\n",
            {
                "memory.max": "1000\n",
                "memory.current": "900\n",
                "memory.stat": "anon 300\ninactive_file 600\nactive_file 7\n",
            },
            700,
        ),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "2000\n"}, 0),
        ("0::/\n", {"memory.max": "99999999999\n", "memory.current": "0\n"}, MACHINE),
        (  # any group around this one may be the narrow one
            "0::/pod/app\n",
            {
                "pod/memory.max": "1000\n",
                "pod/memory.current": "600\n",
                "pod/app/memory.max": "500\n",
                "pod/app/memory.current": "50\n",
            },
            400,
        ),
        ("0::/not/seen/from/here\n", {"memory.max": "9\n", "memory.current": "1\n"}, 8),
        (  # version 1, beside one of version 2 that has no memory controller
            "4:cpu,cpuacct:/app\n3:memory:/app\n0::/\n",
            {
                "memory/app/memory.limit_in_bytes": "1000\n",
                "memory/app/memory.usage_in_bytes": "900\n",
                "memory/app/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "5\n",
            },
            150,
        ),
    ],
)
def test_what_may_still_be_taken(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    assert free_bytes(machine(tmp_path, groups, files)) == free


def test_where_nothing_tells_nothing_is_refused(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    check_kv_tokens(EngineConfig(kv_tokens=10**15), 512, None)


def test_the_last_block_that_fits() -> None:
    config = EngineConfig(kv_tokens=64, block_size=16)
    check_kv_tokens(config, 100, 6_400)
    with pytest.raises(ConfigError) as told:
        check_kv_tokens(config, 100, 6_399)
    assert str(told.value) == (
        "kv_tokens: 64 need 6400 bytes (100 a token), and there are 6399: 48 tokens fit"
    )
