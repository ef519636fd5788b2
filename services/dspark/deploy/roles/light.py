"""A process that is a gateway and nothing else has no use for torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from dspark.deploy.cluster_config import ClusterConfig
from dspark.models import known_models


def without_torch(config: ClusterConfig) -> bool:
    """From now on this process works as one of an installation without torch; whether it does.

    Reading a tokenizer makes transformers import torch if it is there, for its models' sake: 3 s of
    a core and 300 MB. So: before anything has imported it, in a process that never runs another
    role, and where the model stands ready on disk (to convert one takes torch).
    """
    if sys.modules.get("torch") is not None or not _is_ready(config.model):
        return False
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    modules: dict[str, Any] = sys.modules  # Python's own mark of what cannot be imported is None
    modules["torch"] = None
    return True


def _is_ready(model: str) -> bool:
    return Path(model).is_dir() or any(m.cached for m in known_models() if m.name == model)
