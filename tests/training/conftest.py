"""The command line's tiny model, for the commands that train."""

from ..cli.conftest import cache, checkpoint, dspark, shared_cache

__all__ = ["cache", "checkpoint", "dspark", "shared_cache"]
