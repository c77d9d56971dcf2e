"""Opens a model's tensors from a model folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch

from quant.checkpoint.gguf.file import is_gguf
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.mapped import MappedTensors, Progress
from quant.checkpoint.safetensors import Checkpoint


def open_checkpoint(model: Path, progress: Progress | None = None, dtype: torch.dtype = torch.float32) -> MappedTensors:
    """Opens the tensors of a model folder or a GGUF file. `dtype` is the type of tensors such as the embedding, which a
    GGUF file may store in blocks and which are served as plain numbers. Raises BadFile."""
    return GgufTensors(model, progress, dtype) if is_gguf(model) else Checkpoint(model, progress)
