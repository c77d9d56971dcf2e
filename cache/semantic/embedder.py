"""Texts to unit vectors: an exported model under onnxruntime, one thread, one text at a time.

Belongs to one thread, `worker`'s. What it takes is in docs/perf-log.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

MODEL = "model.onnx"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"


class Embedder(Protocol):
    """What the semantic cache needs of a model."""

    @property
    def digest(self) -> str:
        """Vectors of two digests must never meet in one index."""

    @property
    def width(self) -> int: ...

    def tokens(self, text: str) -> int:
        """How long the text is, marks at both ends not counted. Nothing is ever truncated."""

    def embed(self, text: str) -> Vector:
        """A unit vector."""


class OnnxEmbedder:
    """An `Embedder` from a folder that `export` wrote."""

    def __init__(self, folder: Path) -> None:
        # Imported here: both take long, and a server with the cache off needs neither.
        import onnxruntime  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from tokenizers import Tokenizer

        manifest = json.loads((folder / MANIFEST).read_text())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._digest = str(manifest["digest"])
        self._width = int(manifest["width"])
        self._session: Any = onnxruntime.InferenceSession(
            str(folder / MODEL), options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def digest(self) -> str:
        """As the protocol says."""
        return self._digest

    @property
    def width(self) -> int:
        """As the protocol says."""
        return self._width

    def tokens(self, text: str) -> int:
        """As the protocol says."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def embed(self, text: str) -> Vector:
        """As the protocol says."""
        ids = np.array([self._tokenizer.encode(text).ids], np.int64)
        vector: Vector = self._session.run(None, {"ids": ids})[0]
        return vector
