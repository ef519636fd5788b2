"""What verifiers have asked of a drafter and no pass has served yet: bounded, fair, newest first.

Each verifier has a line of its own, so none can fill another's, and a pass takes from them in turn.
Nothing here waits or locks: `DraftRunner` does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.core.drafts import Draft, DraftRequest, DraftSampling, FloatArray, NeedContext
from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingMode

Reply = Draft | NeedContext

_NO_DRAFT = DraftSampling(SamplingMode.GREEDY)


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """max_batch: requests of a pass. window_s: seconds that a pass waits for other verifiers'
    requests, 0 = takes what is there. Of one verifier: max_queue, requests and context that wait,
    max_queue_bytes, of their ids and features; max_sessions, above which the oldest is forgotten.

    A pass of a small drafter takes 2 to 20 ms: to wait 1 ms for another verifier costs less than a
    second pass.
    """

    max_batch: int = 64
    window_s: float = 0.001
    max_queue: int = 256
    max_queue_bytes: int = 64 * 2**20
    max_sessions: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_queue_bytes", "max_sessions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 <= self.window_s <= 1:
            raise ConfigError(f"window_s: {self.window_s} must be in [0, 1]")


@dataclass(frozen=True, slots=True)
class Context:
    """Context without a wish for a draft (proto DraftContext). tokens: n ids at positions start..;
    features: float32 [n, d], or None for a drafter that reads none."""

    session: str
    start: int
    tokens: tuple[int, ...]
    features: FloatArray | None


@dataclass(slots=True, eq=False)
class Job:
    """One request as the drafter gets it: `request.session` is the drafter's own name for
    `session`. wanted: somebody waits for the draft. arrived: on the runner's clock."""

    line: Line
    session: str
    request: DraftRequest
    wanted: bool
    arrived: float

    @property
    def nbytes(self) -> int:
        features = self.request.features
        return 4 * len(self.request.tokens) + (0 if features is None else features.nbytes)


class Line:
    """One verifier's sessions, and what waits for them. put: takes replies, in the event loop.

    A session's jobs stay in order; a new round makes the one that still waits unwanted.
    """

    def __init__(
        self, number: int, config: BatchingConfig, put: Callable[[Sequence[Reply]], None]
    ) -> None:
        self.put = put
        self.closed = False
        self.asked_at = float("-inf")
        # Whose answer is still owed, by session.
        self.owed: dict[str, Job] = {}
        self.waiting = 0
        self._bytes = 0
        self._prefix = f"{number}:"
        self._config = config
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        # By session, least recently used first: the last position of context that came without a
        # request, whose feature no request can carry yet (an anchor has none).
        self._sessions: OrderedDict[str, Context | None] = OrderedDict()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def key(self, session: str) -> str:
        """The drafter's name for a session: no other verifier, and no other stream, has it."""
        return self._prefix + session

    def keys(self) -> list[str]:
        return [self.key(session) for session in self._sessions]

    def context(self, context: Context, now: float) -> bool:
        """Have it taken in before what comes later. False: no room, it is dropped."""
        last = len(context.tokens) - 1
        tail = self._join(
            Context(
                context.session,
                context.start + last,
                context.tokens[last:],
                # A copy, or it would keep all the others.
                None if context.features is None else context.features[last:].copy(),
            ),
            context.session,
        )
        start, tokens, features = _after(
            tail, context.start, context.tokens, _without_last(context.features)
        )
        request = DraftRequest(
            session=self.key(context.session),
            round=0,
            start=start,
            tokens=tokens,
            features=features,
            output_position=0,
            sampling=_NO_DRAFT,
            gamma=0,
        )
        return self._add(Job(self, context.session, request, False, now))

    def ask(self, request: DraftRequest, now: float) -> bool:
        """Have a block drafted. False: no room, the round is dropped."""
        tail = self._join(None, request.session)
        start, tokens, features = _after(tail, request.start, request.tokens, request.features)
        job = Job(
            self,
            request.session,
            replace(
                request,
                session=self.key(request.session),
                start=start,
                tokens=tokens,
                features=features,
            ),
            True,
            now,
        )
        self._supersede(request.session, start)
        self.owed.pop(request.session, None)
        if not self._add(job):
            return False
        self.owed[request.session] = job
        self.asked_at = now
        return True

    def forget(self, session: str) -> str | None:
        """Drop a session and what waits for it; the drafter's name for it if it was known."""
        if session not in self._sessions:
            return None
        del self._sessions[session]
        self.owed.pop(session, None)
        for job in self._jobs.pop(session, ()):
            self._count(job, -1)
        return self.key(session)

    def overflow(self) -> list[str]:
        """Sessions above the bound that nothing is owed to, forgotten: the drafter's names."""
        over = len(self._sessions) - self._config.max_sessions
        if over <= 0:
            return []
        idle = [session for session in self._sessions if session not in self.owed]
        return [self.key(session) for session in idle[:over] if self.forget(session)]

    def first_jobs(self) -> list[Job]:
        """Of each session the job that comes next, the one that waits longest first."""
        return [jobs[0] for jobs in self._jobs.values()]

    def take(self, job: Job) -> None:
        """One of `first_jobs` goes into a pass."""
        jobs = self._jobs[job.session]
        jobs.popleft()
        self._count(job, -1)
        if jobs:
            self._jobs.move_to_end(job.session)
        else:
            del self._jobs[job.session]

    def settle(self, job: Job, reply: Reply | None) -> Reply | None:
        """What a verifier is told of a pass's reply (None: the pass failed), if anything."""
        if job.wanted:
            if self.owed.get(job.session) is not job:
                return None  # a newer round is asked, or the session is closed
            del self.owed[job.session]
            if reply is None:
                return no_draft(job.session, job.request.round)
        elif not isinstance(reply, NeedContext) or job.session in self.owed:
            return None  # context that fits is not answered, and a request is told itself
        return replace(reply, session=job.session)

    def _join(self, tail: Context | None, session: str) -> Context | None:
        """The tail of a session's context so far; the new one takes its place."""
        before = self._sessions.pop(session, None)
        self._sessions[session] = tail
        return before

    def _add(self, job: Job) -> bool:
        config = self._config
        if self.waiting >= config.max_queue or self._bytes + job.nbytes > config.max_queue_bytes:
            return False
        self._jobs.setdefault(job.session, deque()).append(job)
        self._count(job, 1)
        return True

    def _supersede(self, session: str, start: int) -> None:
        """The round that waits is not wanted any more; what it brings may be."""
        jobs = self._jobs.get(session)
        if not jobs or not jobs[-1].wanted:
            return
        if start <= jobs[-1].request.start:
            self._count(jobs.pop(), -1)
            if not jobs:
                del self._jobs[session]
        else:
            jobs[-1].wanted = False
            jobs[-1].request = replace(jobs[-1].request, gamma=0)

    def _count(self, job: Job, sign: int) -> None:
        self.waiting += sign
        self._bytes += sign * job.nbytes


def interleave(lines: Sequence[Sequence[Job]], most: int) -> list[Job]:
    """Jobs of a pass: one of each line in turn, at most `most`."""
    taken: list[Job] = []
    for place in range(max(map(len, lines), default=0)):
        for jobs in lines:
            if place < len(jobs):
                if len(taken) == most:
                    return taken
                taken.append(jobs[place])
    return taken


def no_draft(session: str, round_: int) -> Draft:
    return Draft(session, round_, (), np.zeros(0, np.float32))


def _without_last(features: FloatArray | None) -> FloatArray | None:
    return None if features is None else features[:-1]


def _after(
    tail: Context | None, start: int, tokens: tuple[int, ...], features: FloatArray | None
) -> tuple[int, tuple[int, ...], FloatArray | None]:
    """Start, ids and features with the one position put before them that is still owed."""
    if tail is None or tail.start + 1 != start:
        return start, tokens, features
    if features is not None and tail.features is not None:
        features = np.concatenate([tail.features, features])
    return tail.start, tail.tokens + tokens, features
