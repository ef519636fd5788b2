"""A trained drafter behind the `Drafter` protocol: cached context, ragged batches, three modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dspark.core.drafts import MAX_SUPPORT, Draft, DrafterCard, DraftRequest, NeedContext
from dspark.core.errors import ConfigError, InvalidRequest
from dspark.core.plans import CalibrationTable
from dspark.models.cache import Progress
from dspark.models.drafters.checkpoint import DrafterCheckpoint
from dspark.models.drafters.choosing import Chooser
from dspark.models.drafters.kernels import DraftKernel, TorchKernel
from dspark.models.drafters.native import NativeDraftOptions, NativeKernel
from dspark.models.drafters.sessions import Ready, Sessions
from dspark.models.targets.features import FeatureProjection

# Candidates that the sequential head is applied to: as many as a support may hold.
CANDIDATES = MAX_SUPPORT


class ModelDrafter:
    """Drafts with a checkpoint's model, which is its own from then on: on torch, or `native`.

    A round costs the block's own pass and attention over the window: context is projected once,
    when its features come. window: positions W, None for the checkpoint's. candidates: of the
    sequential head, 0 = the whole draft vocabulary. max_sessions, max_bytes: of what is remembered.
    target_id, tokenizer_hash: of the target it serves. rng: of rejection draws. Raises ConfigError,
    and NativeUnavailable where native kernels are asked for and do not fit. progress: told of the
    library being compiled.
    """

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        *,
        window: int | None = None,
        candidates: int = CANDIDATES,
        max_sessions: int = 1024,
        max_bytes: int = 1 << 30,
        target_id: str = "",
        tokenizer_hash: str = "",
        rng: np.random.Generator | None = None,
        native: NativeDraftOptions | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        config, model = checkpoint.config, checkpoint.model
        window = config.window if window is None else window
        for name, value, least in (
            ("window", window, 1),
            ("candidates", candidates, 0),
            ("max_sessions", max_sessions, 1),
            ("max_bytes", max_bytes, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}: {value} must be at least {least}")
        self.projection: FeatureProjection = model.projection()
        self.calibration: tuple[CalibrationTable, ...] = checkpoint.calibration
        self.kernel: DraftKernel
        if native is None:
            self.kernel = TorchKernel(model, candidates)
        else:
            self.kernel = NativeKernel(model, candidates, native, progress)
        # What stands in for c_k without a head for it is known from what is drawn from.
        self._confident = config.confidence
        self._parallel = config.parallel
        self._gamma = config.gamma
        self._width = config.hidden_size
        self._window = window
        self._rng = rng or np.random.default_rng()
        self.sessions = Sessions(
            config,
            window=window,
            max_sessions=max_sessions,
            max_bytes=max_bytes,
            layout=self.kernel.layout,
        )
        self._card = DrafterCard(
            checkpoint.drafter_id,
            kind=config.kind,
            gamma=config.gamma,
            vocab_size=config.vocab_size,
            target_id=target_id,
            tokenizer_hash=tokenizer_hash,
            layer_ids=config.target_layer_ids,
            feature_id=self.projection.feature_id,
            feature_width=self._width,
        )

    @property
    def card(self) -> DrafterCard:
        return self._card

    @property
    def context_window(self) -> int:
        """Positions before the anchor that it reads; older ones need not be sent again."""
        return self._window

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        """One reply a request, in order; all in one pass, unless a session comes twice.

        Raises InvalidRequest, having done nothing, for features that are not float32 [n, d], ids
        outside the vocabulary or a temperature of 0 in a sampling mode.
        """
        for request in requests:
            self._check(request)
        replies: list[Draft | NeedContext | None] = [None] * len(requests)
        for wave in _waves(requests):
            placed = [(at, self.sessions.place(requests[at])) for at in wave]
            ready = [(at, reply) for at, reply in placed if isinstance(reply, Ready)]
            for at, reply in placed:
                if not isinstance(reply, Ready):
                    replies[at] = reply
            if ready:
                drafts = self._draft([one for _, one in ready])
                for (at, _), draft in zip(ready, drafts, strict=True):
                    replies[at] = draft
        self.sessions.make_room(keep=len({request.session for request in requests}))
        return [reply for reply in replies if reply is not None]

    def close(self, session: str) -> None:
        self.sessions.close(session)

    def _draft(self, batch: Sequence[Ready]) -> list[Draft]:
        try:
            for ready in batch:
                self.sessions.make_slots(ready.session)
            self.kernel.inject(self.sessions, batch)
            wanted = [self._wanted(ready) for ready in batch]
            drawn = [ready for ready, steps in zip(batch, wanted, strict=True) if steps]
            drafts = iter(self._draw(drawn, max(wanted)) if drawn else ())
        except BaseException:
            for ready in batch:  # nobody knows how far it came
                self.sessions.close(ready.request.session)
            raise
        replies = []
        for ready, steps in zip(batch, wanted, strict=True):
            request = ready.request
            empty = Draft(request.session, request.round, (), np.zeros(0, np.float32))
            ready.session.draft = next(drafts) if steps else empty
            replies.append(ready.session.draft)
        return replies

    def _wanted(self, ready: Ready) -> int:
        """Tokens to draft for a request. A pair drafter has nothing to go by at position 0."""
        if not self._parallel and ready.request.anchor_position == 0:
            return 0
        return max(0, min(self._gamma, ready.request.gamma))

    def _draw(self, batch: Sequence[Ready], steps: int) -> list[Draft]:
        requests = [ready.request for ready in batch]
        chooser = Chooser(requests, self._rng, tops=not self._confident)
        ids, confidence = self.kernel.draft(self.sessions, batch, chooser, steps)
        drafts = []
        for row, ready in enumerate(batch):
            request, length = ready.request, self._wanted(ready)
            support = chooser.support(row)
            drafts.append(
                Draft(
                    request.session,
                    request.round,
                    ids=tuple(ids[row, :length].tolist()),
                    confidence_logits=confidence[row, :length].copy(),
                    support_ids=None if support is None else support[0][:length],
                    support_weights=None if support is None else support[1][:length],
                )
            )
        return drafts

    def _check(self, request: DraftRequest) -> None:
        count = len(request.tokens) - 1
        features, sampling = request.features, request.sampling
        if features is None or features.shape != (count, self._width):
            shape = None if features is None else features.shape
            raise InvalidRequest("features", shape, f"must be [{count}, {self._width}]")
        if features.dtype != np.float32:
            raise InvalidRequest("features", str(features.dtype), "must be float32")
        if request.start < 0 or not 0 <= min(request.tokens) <= max(request.tokens):
            raise InvalidRequest("start", request.start, "and ids must be at least 0")
        if max(request.tokens) >= self._card.vocab_size:
            raise InvalidRequest(
                "tokens", max(request.tokens), f"must be below {self._card.vocab_size}"
            )
        if sampling.mode != "greedy" and not sampling.temperature > 0:
            raise InvalidRequest("temperature", sampling.temperature, "must be above 0")
        if sampling.mode == "rejection" and request.support_m < 1:
            raise InvalidRequest("support_m", request.support_m, "must be at least 1")


def _waves(requests: Sequence[DraftRequest]) -> Iterator[list[int]]:
    """Indices of requests, split so that no session comes twice in a wave."""
    left = list(range(len(requests)))
    while left:
        first: dict[str, int] = {}
        later = []
        for at in left:
            if first.setdefault(requests[at].session, at) != at:
                later.append(at)
        yield list(first.values())
        left = later
