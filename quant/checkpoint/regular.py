"""Opens the files of a model folder. Whatever could be waited for without end is refused: pipes, devices, sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from quant.checkpoint.errors import BadFile


def open_regular(file: Path) -> BinaryIO:
    """A regular file, or what a link to one leads to. Raises BadFile for another kind, OSError as `open` does."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile(file, "is no regular file", "copy it again from where the model came from")
    return os.fdopen(descriptor, "rb")
