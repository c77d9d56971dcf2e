"""Converts faults in a model folder that `quant.checkpoint` finds to the engine's own error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import InvalidModel
from quant.checkpoint.errors import BadConfig, BadFile, BadTensor, CheckpointError
from quant.checkpoint.mapped import MappedTensors

AGAIN = "download the file again, or use the config.json that belongs to it"


@contextlib.contextmanager
def checkpoint_errors(folder: Path, checkpoint: MappedTensors | None = None) -> Iterator[None]:
    """Raises InvalidModel of one line, `file: fault; remedy`; `checkpoint` knows which file has a tensor."""
    try:
        yield
    except BadFile as error:
        raise InvalidModel(str(error)) from error
    except BadConfig as error:
        raise InvalidModel(f"{folder}: {error}; mend the config") from error
    except BadTensor as error:
        known = checkpoint is not None and error.tensor in checkpoint.names()
        where = checkpoint.file(error.tensor) if checkpoint is not None and known else folder
        raise InvalidModel(f"{where}: {error}; {AGAIN}") from error
    except CheckpointError as error:
        raise InvalidModel(f"{folder}: {error}; {AGAIN}") from error
