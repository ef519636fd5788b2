"""What a simulation is of: every default once, with its unit (`reading.py` reads it from TOML)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import ConfigError, InvalidRequest
from dspark.scheduler.planner import Policy
from dspark.scheduler.simulation.profiles import Domain
from dspark.scheduler.simulation.strict import choice, number
from dspark.scheduler.step_cost import StepCost

# The policy of a verifier that follows the central plan: `top-k` with capacities from there.
CENTRAL = "central"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt or an answer: `fixed` at the mean, `uniform` in [least, most], `geometric`
    or `lognormal` about the mean (spread: standard deviation of the logarithm), cut to [least,
    most]."""

    kind: str = choice("fixed", "uniform", "geometric", "lognormal")
    mean: float = number(256.0, 1)
    spread: float = number(0.7, 0, 3)
    least: int = number(1, 1)
    most: int = number(32_768, 1, 1_000_000)

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"least: {self.least} must be at most `most`, {self.most}")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """closed: `users`, each with one request at a time and think_s between two. poisson: `rate`
    requests a second. bursts: `rate` for on_s seconds, then quiet_rate for off_s, both times drawn
    from exponential distributions."""

    kind: str = choice("closed", "poisson", "bursts")
    users: int = number(16, 1, 1_000_000)
    think_s: float = number(0.0, 0)
    rate: float = number(10.0, above=0)
    quiet_rate: float = number(0.0, 0)
    on_s: float = number(1.0, above=0)
    off_s: float = number(4.0, above=0)
    prompt: int | Lengths = number(256, 1, 1_000_000)  # noqa: RUF009
    answer: int | Lengths = number(256, 1, 1_000_000)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Verifiers:
    """`count` verifiers alike. step_cost: a file that `dspark profile` or `StepCost.save` wrote, a
    preset's name, or {tokens, table_s, …} itself. slowdown: multiplies its seconds. step_noise:
    standard deviation of the logarithm of a step's seconds. prefills: false where prompts come
    computed (prefill and decode on separate machines). groups: of its sequences; while one is
    drafted another is verified. kv_tokens, max_sequences, max_step_tokens, prefill_chunk,
    max_waiting: as `EngineConfig`."""

    step_cost: str | StepCost
    count: int = number(1, 1, 100_000)
    slowdown: float = number(1.0, above=0)
    step_noise: float = number(0.0, 0, 2)
    prefills: bool = True
    groups: int = number(1, 1, 8)
    kv_tokens: int = number(1_000_000, 16)
    max_sequences: int = number(64, 1, 65_536)
    max_step_tokens: int = number(8192, 1)
    prefill_chunk: int = number(512, 1)
    max_waiting: int = number(1024, 1, 1_000_000)

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_sequences:
            raise ConfigError(
                f"max_step_tokens: {self.max_step_tokens} is below max_sequences, "
                f"{self.max_sequences}: a step must hold one token of each sequence"
            )

    @property
    def cost(self) -> StepCost:
        """With the slowdown. Only of a configuration that was read: its costs are known."""
        cost, factor = self.step_cost, self.slowdown
        assert isinstance(cost, StepCost)
        if factor == 1.0:
            return cost
        return StepCost(
            cost.tokens,
            tuple(factor * seconds for seconds in cost.table_s),
            factor * cost.per_sequence_s,
            factor * cost.per_context_token_s,
            factor * cost.per_verified_sequence_s,
        )


@dataclass(frozen=True, slots=True)
class Drafters:
    """`count` drafters alike. A forward pass for n draft tokens takes pass_s + n / tokens_per_s
    seconds; at most max_batch requests share one."""

    tokens_per_s: float = number(above=0)
    pass_s: float = number(0.0, 0)
    max_batch: int = number(64, 1, 65_536)
    count: int = number(1, 1, 100_000)


@dataclass(frozen=True, slots=True)
class Drafting:
    """gamma: draft tokens of a block. share: seconds of drafting B tokens beside the target, as a
    part of T(B); where there are no `drafters`. timeout_s: after which a sequence goes on without
    its draft. sampled: requests are bound by the barrier (rejection sampling); else a planner may
    look ahead (greedy and seeded requests)."""

    gamma: int = number(7, 1, MAX_GAMMA)
    share: float = number(0.0, 0, 10)
    timeout_s: float = number(1.0, above=0)
    sampled: bool = True


@dataclass(frozen=True, slots=True)
class Tenant:
    """share: of tokens where more is asked than can be served. traffic: its part of the requests,
    by weight. domains: that its requests are of, all if empty. deadline_s: for a whole answer, 0
    for none. floor_tps: tokens a second that a request should not fall below."""

    name: str
    share: float = number(1.0, above=0)
    traffic: float = number(1.0, above=0)
    domains: tuple[str, ...] = ()
    priority: int = number(0, -100, 100)
    floor_tps: float = number(0.0, 0)
    deadline_s: float = number(0.0, 0)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """interval_s: between two reports, and two plans. heartbeat_s: of replicas and leases.
    old_steps: by how many steps the survivals are older that a local capacity K is made from (1:
    our engine; 2: §5.2). gateways: that hold the leases."""

    interval_s: float = number(0.05, above=0)
    heartbeat_s: float = number(0.5, above=0)
    old_steps: int = number(1, 1, 16)
    gateways: int = number(1, 1, 1000)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request is counted as missed beyond, seconds; 0 for no objective."""

    ttft_s: float = number(0.0, 0)
    tpot_s: float = number(0.0, 0)


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared: a policy (`none`, `fixed:N`, `threshold:X`, `early-stop`, `top-k`,
    `central`) and what differs with it. gamma, draft_share: of `drafting` if not given; `fixed:N`
    asks for N."""

    policy: str
    name: str = ""
    gamma: int | None = number(None, 1, MAX_GAMMA)
    draft_share: float | None = number(None, 0, 10)

    def __post_init__(self) -> None:
        self.rule  # noqa: B018  a policy that is none is found at start

    @property
    def label(self) -> str:
        return self.name or self.policy

    @property
    def central(self) -> bool:
        return self.policy == CENTRAL

    @property
    def rule(self) -> Policy:
        try:
            return Policy.parse("top-k" if self.central else self.policy)
        except InvalidRequest as error:
            raise ConfigError(f"policy: {error.value!r} {error.limit}, or {CENTRAL}") from None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values that one setting takes in turn, each with every arm: users of a closed loop, requests
    a second of an open one, drafters."""

    users: tuple[int, ...] = number((), 1, 1_000_000)
    rate: tuple[float, ...] = number((), above=0)
    drafters: tuple[int, ...] = number((), 1, 100_000)

    def __post_init__(self) -> None:
        if sum(map(bool, (self.users, self.rate, self.drafters))) > 1:
            raise ConfigError("users: only one of users, rate and drafters may be swept")


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """duration_s: simulated seconds, warmup_s of them not measured. requests: that are answered
    before it ends, if that is sooner; 0 for no limit. preset: what a file leaves out."""

    verifiers: tuple[Verifiers, ...]
    domains: tuple[Domain, ...]
    arms: tuple[Arm, ...] = (Arm("none"), Arm("fixed:1"), Arm("top-k"), Arm(CENTRAL))
    seed: int = number(0, 0, 2**63 - 1)
    duration_s: float = number(30.0, above=0)
    warmup_s: float = number(3.0, 0)
    requests: int = number(0, 0)
    network_s: float = number(0.0, 0, 10)
    preset: str = ""
    arrivals: Arrivals = field(default_factory=Arrivals)
    drafting: Drafting = field(default_factory=Drafting)
    drafters: tuple[Drafters, ...] = ()
    tenants: tuple[Tenant, ...] = (Tenant("all"),)
    scheduler: Scheduling = field(default_factory=Scheduling)
    objectives: Objectives = field(default_factory=Objectives)
    sweep: Sweep = field(default_factory=Sweep)

    def __post_init__(self) -> None:
        for name in ("verifiers", "domains", "arms", "tenants"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: must have at least one entry")
        if self.warmup_s >= self.duration_s:
            raise ConfigError(
                f"warmup_s: {self.warmup_s:g} must be below duration_s, {self.duration_s:g}"
            )
        for name in ("domains", "tenants"):
            _check_names(name, [entry.name for entry in getattr(self, name)])
        _check_names("arms", [arm.label for arm in self.arms])
        known = {domain.name for domain in self.domains}
        for i, tenant in enumerate(self.tenants):
            for name in tenant.domains:
                if name not in known:
                    raise ConfigError(
                        f"tenants[{i}].domains: {name!r:.40} is not one of {', '.join(known)}"
                    )
        if self.sweep.drafters and len(self.drafters) != 1:
            raise ConfigError("sweep.drafters: needs exactly one entry of drafters, to count")
        if self.sweep.users and self.arrivals.kind != "closed":
            raise ConfigError("sweep.users: needs arrivals.kind = 'closed'")
        if self.sweep.rate and self.arrivals.kind == "closed":
            raise ConfigError("sweep.rate: needs arrivals.kind = 'poisson' or 'bursts'")

    def gamma(self, arm: Arm) -> int:
        """Draft tokens of a block: no more than a `fixed` policy can verify."""
        gamma = self.drafting.gamma if arm.gamma is None else arm.gamma
        return min(gamma, arm.rule.length) if arm.rule.length else gamma

    def swept(self) -> list[tuple[str, float, SimulationConfig]]:
        """(setting, value, configuration) of each point; one of no setting if none is swept."""
        for name in ("users", "rate"):
            if values := getattr(self.sweep, name):
                return [
                    (name, value, replace(self, arrivals=replace(self.arrivals, **{name: value})))
                    for value in values
                ]
        if self.sweep.drafters:
            (kind,) = self.drafters
            return [
                ("drafters", count, replace(self, drafters=(replace(kind, count=count),)))
                for count in self.sweep.drafters
            ]
        return [("", 0.0, self)]


def _check_names(field_name: str, names: list[str]) -> None:
    for i, name in enumerate(names):
        if not name or not name.isprintable() or len(name) > 100:
            raise ConfigError(f"{field_name}[{i}].name: {name!r:.40} must be a printable name")
        if name in names[:i]:
            raise ConfigError(f"{field_name}[{i}].name: {name!r} is given twice")
