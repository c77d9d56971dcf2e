"""Decides the weights' format in memory: the folder's, or rounded to eight bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import Unsupported
from engine.loading.border import checkpoint_errors
from engine.settings import Quantization
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.formats import INT8, format_name, read_spec
from quant.checkpoint.reading import load_config
from quant.checkpoint.spec import GgufSpec, Int8Spec, QuantSpec


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """spec: the folder's format, None where weights are plain. int8: plain ones become eight bits while they are
    loaded."""

    spec: QuantSpec | None
    int8: bool = False

    @property
    def in_memory(self) -> QuantSpec | None:
        return Int8Spec() if self.int8 else self.spec

    def on(self, device: str) -> FolderFormat:
        """A GPU has no kernel that reads minima, so a GGUF file's four bits with minima take another form there."""
        if device == "cpu" or not isinstance(self.spec, GgufSpec):
            return self
        return replace(self, spec=replace(self.spec, exact=False))

    @property
    def name(self) -> str:
        return INT8 if self.int8 else format_name(self.spec)


def read_folder(folder: Path, quantization: Quantization) -> tuple[ModelConfig, FolderFormat]:
    """Reads JSON files, or a GGUF file's header. Raises InvalidModel for a model that cannot be served, Unsupported
    where `quantization` does not fit the format."""
    with checkpoint_errors(folder):
        config, spec = load_config(folder), read_spec(folder)
    if quantization == "int8" and spec is not None:
        held = format_name(spec)
        raise Unsupported(f"quantization int8: {folder} holds {held} weights already; use auto, or the bf16 model")
    return config, FolderFormat(spec, int8=quantization == "int8")
