"""The headers of the scripts are true: what they say of a key stands in names.py, and the keys that
they name are those that they use."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from redis.crc import key_slot

from dspark.core.errors import ConfigError
from dspark.scheduler.store import redis_store
from dspark.scheduler.store.lua import load
from dspark.scheduler.store.names import KEYS, check_cluster, key

FOLDER = files("dspark.scheduler.store") / "scripts"
SCRIPTS = load()
NAMES = sorted(SCRIPTS)
PRELUDE = (FOLDER / "prelude.lua").read_text(encoding="utf-8")


def body(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def used(text: str) -> set[str]:
    """Keys a piece of Lua touches, also through the prelude's functions it calls."""
    functions = dict(re.findall(r"^local function (\w+)(.*?)^end$", PRELUDE, re.M | re.S))
    code = re.sub(r"--.*", "", text)
    seen: set[str] = set()
    waiting = [code]
    while waiting:
        code = waiting.pop()
        for name in set(re.findall(r"\b(\w+)\(", code)) & functions.keys() - seen:
            seen.add(name)
            waiting.append(functions[name])
    return {
        k
        for part in [text, *map(functions.__getitem__, seen)]
        for k in re.findall(r"K\.(\w+)", part)
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_header_lists_exactly_the_keys_that_are_touched(name: str) -> None:
    assert set(SCRIPTS[name].keys) == used(body(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_what_each_key_is_and_what_goes_in_and_out(name: str) -> None:
    text = re.sub(r"\n-- {20,}", " ", body(name))  # lines that go on
    for key_name in SCRIPTS[name].keys:
        kind = KEYS[key_name]
        assert re.search(rf"^--   {key_name} +{kind.type} +{re.escape(kind.holds)}$", text, re.M)
    assert "\n-- arguments\n--   1 now, ms; empty: the server's clock\n" in text
    assert re.search(r"\n-- result\n--   \w", text)
    said = {int(n) for n in re.findall(r"^--   (\d+)(?:\.\.\.)? ", text, re.M)}
    assert said >= {int(n) for n in re.findall(r"ARGV\[(\d+)\]", text)}
    assert max(map(len, text.splitlines()[-20:])) <= 100


def test_each_script_is_sent_by_the_store() -> None:
    source = Path(redis_store.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"\.run\(\s*\"(\w+)\"", source)) == set(NAMES)


def test_all_keys_of_a_cluster_are_on_one_node_of_redis_cluster() -> None:
    slots = {key_slot(key("a", name).encode()) for name in KEYS}
    assert len(slots) == 1
    assert key_slot(key("b", "members").encode()) not in slots


@pytest.mark.parametrize("name", ["", "a{b}", "a b", "a:b", "é", "x" * 65])
def test_a_clusters_name_cannot_move_its_keys(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster: "):
        check_cluster(name)
