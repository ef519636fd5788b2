"""Models in this process: what a user names becomes a checkpoint, a target, a drafter.

The door stays light: importing it loads neither torch nor transformers.
"""

from dspark.models.catalog import KnownModel, known_models, resolve
from dspark.models.checkpoint import SERVABLE, load_target, load_tokenizer

__all__ = [
    "SERVABLE",
    "KnownModel",
    "known_models",
    "load_target",
    "load_tokenizer",
    "resolve",
]
