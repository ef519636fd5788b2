"""Feature versions: which a step yields, and how long each is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dspark.core.drafts import DrafterCard
from dspark.core.errors import ModelError
from dspark.models.targets.backend import Backend
from dspark.models.targets.features import FeatureProjection
from dspark.verifier.drafters import Drafters
from dspark.verifier.kv_cache import KVCache

# Seconds that features are kept which nobody reads: a drafter that restarts is back before, and
# what it read is worth a prefill of all that is cached.
KEEP_S = 300.0


class Versions:
    """Those of drafters in this process are there from the start and for good; whoever made the
    backend has loaded their projections. Others come with the links that read them; once nobody
    reads them no more are made, and those that are cached are kept for KEEP_S, or until another
    version wants the room. clock: seconds."""

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        drafters: Drafters,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._drafters = drafters
        self._clock = clock
        self._adopted: set[str] = set()
        self._unread: dict[str, float] = {}  # cached, by since when
        for drafter in drafters.values():
            self._open(drafter.card, at_once=True)

    def _open(self, card: DrafterCard, *, at_once: bool = False) -> None:
        if card.feature_id:
            self._cache.features.open(card.feature_id, card.feature_width, at_once=at_once)

    def made(self, feature_id: str) -> bool:
        """Whether each step yields these features already."""
        return feature_id in self._adopted | self._drafters.feature_ids()

    def begin(self, card: DrafterCard, projection: FeatureProjection | None) -> None:
        """Yield what a drafter reads from now on. Raises ModelError for another projection than its
        card names."""
        if card.feature_id and not self.made(card.feature_id):
            if projection is None or projection.feature_id != card.feature_id:
                given = "none" if projection is None else repr(projection.feature_id)
                raise ModelError(f"projection: {given} is not that of the card {card.feature_id!r}")
            self._backend.load_projection(projection)
            self._adopted.add(card.feature_id)
            self._unread.pop(card.feature_id, None)
            self._forget(self._unread)
        self._open(card)

    def retire(self, kept: Collection[str]) -> None:
        """Make no more of those that came with a link and that no drafter reads any more. kept:
        that sequences have been promised."""
        if not self._adopted:
            return
        for feature_id in self._adopted - self._drafters.feature_ids() - set(kept):
            self._adopted.discard(feature_id)
            self._backend.unload_projection(feature_id)
            self._unread[feature_id] = self._clock()

    def tidy(self) -> None:
        """Forget those that have been unread for too long."""
        if self._unread:
            now = self._clock()
            self._forget(f for f, since in self._unread.items() if now - since >= KEEP_S)

    def _forget(self, feature_ids: Iterable[str]) -> None:
        for feature_id in list(feature_ids):
            del self._unread[feature_id]
            self._cache.forget_features(feature_id)
