"""What a report or a request may say before anything is planned from it: it is untrusted (design.md
§4, L5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dspark.core.drafts import MAX_GAMMA, DrafterCard
from dspark.core.errors import InvalidRequest
from dspark.core.leases import LeaseRequest
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Card, DrafterLoad, Member, VerifierCard
from dspark.core.reports import CONFIDENCE_BINS, SURVIVAL_BINS, Counts, Report, VerdictCounts
from dspark.core.sampling import SamplingMode

# Far above what any interval holds, far below where sums of floats or int64 lose a count.
MAX_COUNT = 2**32 - 1
MAX_NUMBER = 2**63 - 1
MAX_TOKENS = 2**53  # of a KV pool: the largest number that a store's scripts can count to
MAX_SECONDS = 3600.0
MAX_RATE = 1e9  # tokens a second
MAX_MEAN = 2.0**31  # requests or tokens of a step
# Entries of a list in one report: what a verifier can have, and a bound on the plan's memory.
MAX_TENANTS = 256
MAX_DRAFTERS = 4096
MAX_VERDICTS = 64
MAX_NAME = 256


def check_report(report: Report, gamma: int = MAX_GAMMA) -> Report:
    """The report itself if every number of it can be planned with, else `InvalidRequest`.

    gamma: the longest block of a drafter here, a bound on positions in verdict counts. The error
    names the first field that is wrong, as in `tenants[2].survivals[7]`, its value and the limit.
    A tenant or drafter that nobody knows is fine.
    """
    _name("verifier", report.verifier)
    _whole("epoch", report.epoch, MAX_NUMBER)
    _whole("seen_through", report.seen_through, MAX_NUMBER)
    _whole("verdicts_through", report.verdicts_through, report.seen_through)
    _real("interval_s", report.interval_s, 1e-6, MAX_SECONDS)
    _whole("steps", report.steps, MAX_COUNT)
    for field in ("requests", "prefill_tokens", "context"):
        _real(field, getattr(report, field), 0.0, MAX_MEAN)
    _real("step_residual_s", report.step_residual_s, -MAX_SECONDS, MAX_SECONDS)
    _whole("free_blocks", report.free_blocks, MAX_COUNT)
    _whole("queue", report.queue, MAX_COUNT)
    _size("tenants", report.tenants, MAX_TENANTS)
    _size("drafters", report.drafters, MAX_DRAFTERS)
    names: set[str] = set()
    for i, tenant in enumerate(report.tenants):
        at = f"tenants[{i}]."
        _new_name(f"{at}tenant", tenant.tenant, names)
        _whole(f"{at}active", tenant.active, MAX_COUNT)
        _whole(f"{at}queued", tenant.queued, MAX_COUNT)
        _whole(f"{at}tokens", tenant.tokens, MAX_COUNT)
        _real(f"{at}floor_tps", tenant.floor_tps, 0.0, MAX_RATE)
        if len(tenant.survivals) != 0:
            _counts(f"{at}survivals", tenant.survivals, SURVIVAL_BINS)
        _size(f"{at}verdicts", tenant.verdicts, MAX_VERDICTS)
        for j, counts in enumerate(tenant.verdicts):
            _verdicts(f"{at}verdicts[{j}].", counts, gamma)
    names = set()
    for i, use in enumerate(report.drafters):
        _new_name(f"drafters[{i}].drafter", use.drafter, names)
        _whole(f"drafters[{i}].drafted", use.drafted, MAX_COUNT)
        _real(f"drafters[{i}].exposed_s", use.exposed_s, 0.0, MAX_SECONDS)
    return report


def check_load(load: DrafterLoad) -> DrafterLoad:
    """The load itself if every number of it is possible, else `InvalidRequest` naming the field."""
    _whole("sessions", load.sessions, MAX_COUNT)
    _whole("queue", load.queue, MAX_COUNT)
    _real("tokens_per_s", load.tokens_per_s, 0.0, MAX_RATE)
    _real("capacity_tokens_per_s", load.capacity_tokens_per_s, 0.0, MAX_RATE)
    return load


def check_member(member: Member) -> Member:
    """The member itself if requests can be routed to it and planned for, else `InvalidRequest`
    naming the field. Its pool and names are the store's to check."""
    card = member.card
    if isinstance(card, VerifierCard):
        _between("verifier.limits.vocab_size", card.limits.vocab_size, 1, MAX_COUNT)
        _between("verifier.limits.context_length", card.limits.context_length, 1, MAX_COUNT)
        _between("verifier.limits.kv_tokens", card.limits.kv_tokens, 1, MAX_TOKENS)
        _between("verifier.block_size", card.block_size, 1, MAX_COUNT)
        _between("verifier.max_sequences", card.max_sequences, 1, MAX_COUNT)
        _between("verifier.max_waiting", card.max_waiting, 0, MAX_COUNT)
    elif isinstance(card, DrafterCard):
        _between("drafter.gamma", card.gamma, 0, MAX_GAMMA)
        _between("drafter.vocab_size", card.vocab_size, 0, MAX_COUNT)
    check_tables(member.calibration, card)
    return member


def check_tables(tables: Sequence[CalibrationTable], card: Card | None) -> None:
    """Tables that a replica ships: a drafter's own, one a mode, of numbers that a logit can be
    divided by. Raises `InvalidRequest`."""
    modes: set[SamplingMode] = set()
    for i, table in enumerate(tables):
        at = f"calibration[{i}]."
        if not isinstance(card, DrafterCard) or table.drafter_id != card.drafter_id:
            raise InvalidRequest(f"{at}drafter_id", table.drafter_id, "must be the drafter's own")
        if table.mode in modes:
            raise InvalidRequest(f"{at}mode", table.mode, "is named twice")
        modes.add(table.mode)
        if (fault := table.fault()) is not None:
            field, value, limit = fault
            raise InvalidRequest(at + field, value, limit)


def check_lease_request(request: LeaseRequest) -> LeaseRequest:
    """The request itself if it can be routed, else `InvalidRequest` naming the field. Names are the
    store's to check."""
    _whole("prompt_tokens", request.prompt_tokens, MAX_COUNT)
    if request.max_tokens is not None:
        _whole("max_tokens", request.max_tokens, MAX_COUNT)
    _real("floor_tps", request.floor_tps, 0.0, MAX_RATE)
    if request.deadline_s is not None:
        _real("deadline_s", request.deadline_s, -math.inf, math.inf)
    return request


def _verdicts(at: str, counts: VerdictCounts, gamma: int) -> None:
    _name(f"{at}drafter_id", counts.drafter_id)
    if not isinstance(counts.mode, SamplingMode):
        raise InvalidRequest(f"{at}mode", counts.mode, "must be a sampling mode")
    _size(f"{at}reached", counts.reached, gamma)
    if len(counts.accepted) != len(counts.reached):
        limit = f"positions, must be as many as reached has: {len(counts.reached)}"
        raise InvalidRequest(f"{at}accepted", len(counts.accepted), limit)
    for k, (reached, accepted) in enumerate(zip(counts.reached, counts.accepted, strict=True)):
        _counts(f"{at}reached[{k}]", reached, CONFIDENCE_BINS)
        _counts(f"{at}accepted[{k}]", accepted, CONFIDENCE_BINS)
        for b, (most, count) in enumerate(zip(reached, accepted, strict=True)):
            if count > most:
                raise InvalidRequest(
                    f"{at}accepted[{k}][{b}]", count, f"must be at most what was reached: {most}"
                )


def _counts(field: str, counts: Counts, bins: int) -> None:
    if len(counts) != bins:
        raise InvalidRequest(field, len(counts), f"bins, must be {bins}")
    # In one go for what is nearly always right; one by one to name what is wrong.
    if set(map(type, counts)) == {int} and min(counts) >= 0 and max(counts) <= MAX_COUNT:
        return
    for b, count in enumerate(counts):
        _whole(f"{field}[{b}]", count, MAX_COUNT)


def _whole(field: str, value: object, most: int) -> None:
    _between(field, value, 0, most)


def _between(field: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(field, value, f"must be a whole number in [{least}, {most}]")


def _real(field: str, value: object, least: float, most: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)  # NaN: no comparison
    if not number or not least <= value <= most:  # type: ignore[operator]
        raise InvalidRequest(field, value, f"must be a number in [{least:g}, {most:g}]")


def _name(field: str, value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise InvalidRequest(field, value, f"must be a name of 1 to {MAX_NAME} characters")


def _new_name(field: str, value: object, seen: set[str]) -> None:
    # The default tenant's name is empty.
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise InvalidRequest(field, value, f"must be a name of at most {MAX_NAME} characters")
    if value in seen:
        raise InvalidRequest(field, value, "is named twice")
    seen.add(value)


def _size(field: str, values: tuple[object, ...], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(field, len(values), f"entries, must be at most {most}")
