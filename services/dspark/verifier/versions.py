"""Feature versions: which a step yields, and how long each is kept."""

from __future__ import annotations

from collections.abc import Collection

from dspark.core.drafts import DrafterCard
from dspark.core.errors import ModelError
from dspark.models.targets.backend import Backend
from dspark.models.targets.features import FeatureProjection
from dspark.verifier.drafters import Drafters
from dspark.verifier.kv_cache import KVCache


class Versions:
    """Those of drafters in this process are there from the start and for good; whoever made the
    backend has loaded their projections. Others come with the links that read them."""

    def __init__(self, backend: Backend, cache: KVCache, drafters: Drafters) -> None:
        self._backend = backend
        self._cache = cache
        self._drafters = drafters
        self._adopted: set[str] = set()
        for drafter in drafters.values():
            self._open(drafter.card)

    def _open(self, card: DrafterCard) -> None:
        if card.feature_id:
            self._cache.features.open(card.feature_id, card.feature_width)

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
        self._open(card)

    def retire(self, kept: Collection[str]) -> None:
        """Forget those that came with a link and that no drafter reads any more. kept: that
        sequences have been promised."""
        if not self._adopted:
            return
        for feature_id in self._adopted - self._drafters.feature_ids() - set(kept):
            self._adopted.discard(feature_id)
            self._backend.unload_projection(feature_id)
            self._cache.forget_features(feature_id)
