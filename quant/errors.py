"""What can be wrong with a quantized checkpoint or with a wish to make one.

QuantError
├── UnsupportedFormat   a known format that cannot be served; says what to do instead
├── BadConfig           a field of the quantization config holds what it cannot
├── BadFile             a file of the model folder is missing, damaged or of a kind that is not read
├── BadTensor           a tensor is missing, of another shape or type, or holds what it cannot
└── CannotQuantize      a model, a job or a machine that the quantizer cannot work with
"""

from __future__ import annotations


class QuantError(Exception):
    """Root of all errors that leave this package. The text is one line."""


class UnsupportedFormat(QuantError):
    """The checkpoint's format is known and cannot be served."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} cannot be served: {remedy}")
        self.name = name
        self.remedy = remedy


class BadConfig(QuantError):
    """A field of the quantization config is missing or out of range."""

    def __init__(self, field: str, expected: str, found: object) -> None:
        super().__init__(f"quantization config, {field}: expected {expected}, found {_short(found)}")
        self.field = field


class BadFile(QuantError):
    """A file of the model folder cannot be used."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file


class BadTensor(QuantError):
    """A tensor is not what the config and the layer's size say it must be."""

    def __init__(self, tensor: str, expected: str, found: str) -> None:
        super().__init__(f"tensor {tensor}: expected {expected}, found {found}")
        self.tensor = tensor
        self.expected = expected
        self.found = found


class CannotQuantize(QuantError):
    """The quantizer cannot do what was asked. The text says why and what to do."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
