"""Lists the faults of a model folder.

CheckpointError
├── BadFile             a file is missing, damaged or has what cannot be served; names it and the remedy
├── UnsupportedFormat   a known quantization format that cannot be served; names what to do instead
├── BadConfig           a field of the quantization config holds what it cannot
├── BadTensor           a tensor is missing, of another shape or type, or holds what it cannot
└── NotFinite           a weight to be rounded holds NaN or infinity
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

AGAIN: Final = "download the file again"  # the remedy of a file that is damaged
MEND: Final = "convert the model again"  # the remedy of a file that says what cannot be


class CheckpointError(Exception):
    """Root of all errors that leave this package. The text is one line."""


class BadFile(CheckpointError):
    """A file of the model folder cannot be used. The text is `file: fault; remedy`."""

    def __init__(self, file: Path | str, fault: str, remedy: str) -> None:
        super().__init__(f"{file}: {fault}; {remedy}")
        self.file = file


class UnsupportedFormat(CheckpointError):
    """The checkpoint's format is known and cannot be served."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} cannot be served: {remedy}")
        self.name = name
        self.remedy = remedy


class BadConfig(CheckpointError):
    """A field of the quantization config is missing or out of range."""

    def __init__(self, field: str, expected: str, found: object) -> None:
        super().__init__(f"quantization config, {field}: expected {expected}, found {short(found)}")
        self.field = field


class BadTensor(CheckpointError):
    """A tensor does not match the config and the layer's size."""

    def __init__(self, tensor: str, expected: str, found: str) -> None:
        super().__init__(f"tensor {tensor}: expected {expected}, found {found}")
        self.tensor = tensor
        self.expected = expected
        self.found = found


class NotFinite(CheckpointError):
    """A weight that is to be rounded to fewer bits holds NaN or infinity."""

    def __init__(self) -> None:
        super().__init__("a weight holds NaN or infinity: the source checkpoint is damaged")


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
