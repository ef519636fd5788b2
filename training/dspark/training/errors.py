"""What can go wrong with data and training runs; each message says where and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.core.errors import DsparkError

# Out of space, out of quota, above the process's file size limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DataError(DsparkError):
    """A file of prompts, answers or a training run that cannot be read or written."""


class TrainingStopped(DsparkError):
    """A run that must not go on: its loss is no number any more."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError below becomes a `DataError` that names `path`, and a full disk by its name."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DataError(
                f"{path}: the disk is full ({os.strerror(error.errno or 0)}); what was written "
                "before is whole: make room and run the same command again"
            ) from error
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
