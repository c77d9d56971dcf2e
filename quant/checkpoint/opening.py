"""A model's tensors, whether a folder or a GGUF file is named."""

from __future__ import annotations

from pathlib import Path

import torch

from quant.checkpoint.gguf.file import is_gguf
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.mapped import MappedTensors, Progress
from quant.checkpoint.safetensors import Checkpoint


def open_checkpoint(model: Path, progress: Progress | None = None, dtype: torch.dtype = torch.float32) -> MappedTensors:
    """`dtype`: of what a GGUF file keeps in blocks and a folder as plain numbers. Raises BadFile."""
    return GgufTensors(model, progress, dtype) if is_gguf(model) else Checkpoint(model, progress)
