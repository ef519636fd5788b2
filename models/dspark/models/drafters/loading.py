"""A drafter's name, directory or hub id becomes a drafter for one target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.core.drafts import Drafter
from dspark.core.errors import ModelError
from dspark.models.cache import Progress
from dspark.models.catalog import resolve
from dspark.models.drafters.ngram import NgramDrafter
from dspark.models.drafters.none import NoneDrafter

if TYPE_CHECKING:
    from dspark.models.drafters.drafting import ModelDrafter
    from dspark.models.drafters.native import NativeDraftOptions
    from dspark.models.drafters.target_tensors import TargetTensors


def make_drafter(
    drafter: str,
    *,
    gamma: int,
    target: TargetTensors | None = None,
    target_id: str = "",
    tokenizer_hash: str = "",
    progress: Progress = lambda _: None,
) -> Drafter:
    """ "ngram", "none", or a checkpoint as `load_drafter` finds it.

    gamma: tokens of a block, for kinds without one of their own. Raises ModelError.
    """
    if drafter == "ngram":
        return NgramDrafter(gamma)
    if drafter == "none":
        return NoneDrafter()
    if target is None:
        raise ModelError(f"drafter {drafter!r}: a trained drafter needs its target's tensors")
    return load_drafter(
        drafter,
        target,
        target_id=target_id,
        tokenizer_hash=tokenizer_hash,
        progress=progress,
    )


def load_drafter(
    drafter: str | Path,
    target: TargetTensors,
    *,
    target_id: str = "",
    tokenizer_hash: str = "",
    window: int | None = None,
    candidates: int | None = None,
    native: NativeDraftOptions | None = None,
    progress: Progress = lambda _: None,
) -> ModelDrafter:
    """A trained drafter of a directory or hub id, checked against the target it is to serve.

    target: its tensors (`TargetTensors.of` a loaded model before a backend repacks it, or `.read`
    from its checkpoint). target_id, tokenizer_hash: as the backend and the tokenizer say; "" =
    unknown. window, candidates: as of ModelDrafter, None for its own. native: draft on the native
    kernels; where they do not fit torch drafts, and one line says why. Whoever runs the target then
    loads `ModelDrafter.projection` into its backend. Raises ModelError with both values.
    """
    from dspark.models.drafters.checkpoint import load_checkpoint
    from dspark.models.drafters.drafting import CANDIDATES, ModelDrafter
    from dspark.models.targets.native import NativeUnavailable

    place = resolve(str(drafter), progress=progress)
    checkpoint = load_checkpoint(place, target)
    made_for = checkpoint.target.tokenizer_hash
    if made_for and tokenizer_hash and made_for != tokenizer_hash:
        raise ModelError(
            f"{place}: was made for the tokenizer {made_for}, this target's is {tokenizer_hash}"
        )
    made = partial(
        ModelDrafter,
        checkpoint,
        window=window,
        candidates=CANDIDATES if candidates is None else candidates,
        target_id=target_id,
        tokenizer_hash=tokenizer_hash,
        progress=progress,
    )
    if native is None:
        return made()
    try:
        return made(native=native)
    except NativeUnavailable as why:
        progress(f"the drafter does not draft natively here, torch does: {why}")
        return made()
