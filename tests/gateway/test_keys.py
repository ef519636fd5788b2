"""Keys, tenants and their limits: a strict file, and buckets on a clock that the test moves."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dspark.core.errors import ConfigError, Overloaded, Unauthenticated
from dspark.gateway.keys import KeyRing, Tenant, TenantLimits, key_hash, new_key

from ..verifier.toy import HandClock

KEY, HASH = "dspark-test", key_hash("dspark-test")
FILE = f"""
tenants:
  acme:
    share: 2
    keys: [{HASH}, {key_hash("another")}]
    limits:
      requests_per_minute: 60
      tokens_per_minute: 6000.5
      concurrent_requests: 3
      max_priority: 5
  small:
    keys: [{key_hash("small")}]
"""


def written(tmp_path: Path, text: str, name: str = "keys.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def tenant(clock: HandClock | None = None, **limits: Any) -> Tenant:
    return Tenant("acme", limits=TenantLimits(**limits), clock=clock or HandClock())


def refused(who: Tenant) -> Overloaded:
    with pytest.raises(Overloaded) as told, who.admit():
        pass
    return told.value


# --- the file


def test_a_file_says_who_may_call_and_how_much(tmp_path: Path) -> None:
    ring = KeyRing.load(written(tmp_path, FILE))
    acme = ring.authenticate(f"Bearer {KEY}")
    assert (acme.name, acme.share) == ("acme", 2.0)
    assert acme.limits == TenantLimits(
        requests_per_minute=60, tokens_per_minute=6000.5, concurrent_requests=3, max_priority=5
    )
    assert ring.authenticate("Bearer another") is acme
    small = ring.authenticate("bearer  small ")
    assert (small.name, small.share, small.limits) == ("small", 1.0, TenantLimits())


def test_json_says_the_same(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": [HASH], "limits": {"concurrent_requests": 2}}}
    file = written(tmp_path, json.dumps({"tenants": tenants}, indent="\t"), "keys.json")
    acme = KeyRing.load(file).authenticate(f"Bearer {KEY}")
    assert acme.limits.concurrent_requests == 2


GOOD = f"keys: [{HASH}]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file: "),
        ("- a\n", "the file: "),
        ("tenants: {}", "tenants: "),
        ("tenants: {acme: {keys: []}}", "tenants: no tenant has a key"),
        (f"tenants: {{acme: {{{GOOD}}}}}\nusers: 3", "users: is not a known field"),
        (f"tenants: {{acme: {{{GOOD}, shares: 2}}}}", "tenants.acme.shares: is not a known field"),
        (
            f"tenants: {{acme: {{{GOOD}, limits: {{rpm: 2}}}}}}",
            "tenants.acme.limits.rpm: is not a known field",
        ),
        (f"tenants: {{acme: {{{GOOD}, share: 0}}}}", "tenants.acme.share: "),
        (f"tenants: {{acme: {{{GOOD}, share: .inf}}}}", "tenants.acme.share: "),
        (f"tenants: {{acme: {{{GOOD}, share: '2'}}}}", "tenants.acme.share: "),
        (
            f"tenants: {{acme: {{{GOOD}, limits: {{concurrent_requests: 1.5}}}}}}",
            "tenants.acme.limits.concurrent_requests: ",
        ),
        (
            f"tenants: {{acme: {{{GOOD}, limits: {{requests_per_minute: -1}}}}}}",
            "tenants.acme.limits.requests_per_minute: ",
        ),
        (f"tenants: {{a/b: {{{GOOD}}}}}", "tenants.a/b"),
        ("tenants: {acme: {}}", "tenants.acme.keys: "),
        (
            f"tenants: {{a: {{{GOOD}}}, b: {{{GOOD}}}}}",
            "tenants.b.keys.0: is a key of tenant a already",
        ),
        (f"tenants: {{a: {{{GOOD}}}, a: {{{GOOD}}}}}", "a: is given twice"),
        ("tenants: [", "line 1: is not YAML"),
        ("tenants: !!python/object:os.system {}", "line 1: is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        KeyRing.load(path)
    assert str(error.value).startswith(f"{path}: {told}")


def test_a_bad_json_file_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: is not JSON"):
        KeyRing.load(written(tmp_path, "{\n'a': 1}", "keys.json"))
    with pytest.raises(ConfigError, match="a: is given twice"):
        KeyRing.load(written(tmp_path, '{"a": 1, "a": 2}', "keys.json"))
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing.load(tmp_path / "none.yaml")


def test_a_key_pasted_for_its_hash_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        KeyRing.load(written(tmp_path, f"tenants: {{acme: {{keys: [{KEY}]}}}}"))
    assert "tenants.acme.keys.0: " in str(error.value)
    assert KEY not in str(error.value)


# --- who it is


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        "Bearer wrong",
        f"Bearer {HASH}",
        "Bearer é\udc80",
    ],
)
def test_nobody_else_comes_in_and_no_key_is_told(
    tmp_path: Path, header: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Unauthenticated) as error:
        KeyRing.load(written(tmp_path, FILE)).authenticate(header)
    for word in (header or "").split()[1:]:
        assert word not in str(error.value) + caplog.text


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    ring = KeyRing()
    assert ring.authenticate(None) is ring.authenticate("Bearer whatever")
    assert ring.authenticate(None).name == "default"
    assert ring.authenticate(None).priority(100) == 100


def test_a_new_key_is_long_and_known_by_its_hash_alone(tmp_path: Path) -> None:
    (key, hashed), (other, _) = new_key(), new_key()
    assert key != other
    assert len(key) > 40
    ring = KeyRing.load(written(tmp_path, f"tenants: {{acme: {{keys: [{hashed}]}}}}"))
    assert ring.authenticate(f"Bearer {key}").name == "acme"


# --- how much


def test_no_more_run_at_once_than_the_limit_also_after_failures() -> None:
    who = tenant(concurrent_requests=2)
    with who.admit():
        with pytest.raises(RuntimeError), who.admit():
            raise RuntimeError
        with who.admit():
            told = refused(who)
            assert str(told) == "2 requests of tenant acme are running, the limit is 2"
            assert told.retry_after_s > 0
        with who.admit():
            assert who.running == 2
    assert who.running == 0


def test_requests_come_back_evenly_and_the_refusal_says_when() -> None:
    clock = HandClock()
    who = tenant(clock, requests_per_minute=6)
    for _ in range(6):
        with who.admit():
            pass
    told = refused(who)
    assert told.retry_after_s == pytest.approx(10)
    assert "6 requests a minute" in str(told)
    clock.now += 9
    assert refused(who).retry_after_s == pytest.approx(1)
    clock.now += refused(who).retry_after_s
    with who.admit():
        pass
    refused(who)


def test_less_than_one_request_a_minute_is_a_limit_too() -> None:
    clock = HandClock()
    who = tenant(clock, requests_per_minute=0.5)
    with who.admit():
        pass
    assert refused(who).retry_after_s == pytest.approx(120)


def test_tokens_are_paid_when_they_are_known_and_a_debt_is_waited_out() -> None:
    clock = HandClock()
    who = tenant(clock, tokens_per_minute=600)
    with who.admit():
        who.spend(100)
        who.spend(1100)  # 600 below nothing
    assert refused(who).retry_after_s == pytest.approx(60, abs=0.2)
    clock.now += 61
    with who.admit():
        who.spend(10)
    refused(who)


def test_idle_time_fills_a_bucket_once() -> None:
    clock = HandClock()
    who = tenant(clock, tokens_per_minute=600)
    clock.now += 3600
    with who.admit():
        who.spend(600)
    refused(who)
    clock.now += 3600
    who.spend(600)
    refused(who)


def test_a_refusal_uses_nothing_up() -> None:
    clock = HandClock()
    who = tenant(clock, requests_per_minute=2, concurrent_requests=1, tokens_per_minute=100)
    with who.admit():
        for _ in range(5):
            refused(who)
    who.spend(150)
    for _ in range(5):
        assert "tokens" in str(refused(who))
    clock.now += 31
    with who.admit():
        assert who.running == 1


def test_a_wish_for_priority_is_lowered_to_the_tenants() -> None:
    assert tenant().priority(7) == 0
    assert tenant(max_priority=5).priority(7) == 5
    assert tenant(max_priority=5).priority(-3) == -3
