"""Texts to unit vectors: an exported model on one thread, one text at a time, in C where the processor and the folder
allow it, else under onnxruntime. Durations are in docs/measurements/caches.md."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache.semantic.native import NativeEncoder, Vector, lacking

__all__ = ["Embedder", "ModelEmbedder", "Vector", "native_embedder", "onnx_embedder", "open_embedder"]

log = logging.getLogger(__name__)

MODEL = "model.onnx"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"
NATIVE = "native"
ONNX = "onnxruntime"


class Embedder(Protocol):
    @property
    def digest(self) -> str:
        """Vectors of two digests must never meet in one index."""

    @property
    def width(self) -> int: ...

    def tokens(self, text: str) -> int:
        """Counts tokens without the marks at both ends. Nothing is ever truncated."""

    def embed(self, text: str) -> Vector:
        pass


class ModelEmbedder:
    def __init__(self, folder: Path, digest: str, width: int, encode: Callable[[Sequence[int]], Vector]) -> None:
        # Imported here, since it takes long and a server with the cache off does not need it.
        from tokenizers import Tokenizer

        self._digest = digest
        self._width = width
        self._encode = encode
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._marks = int(self._tokenizer.num_special_tokens_to_add(False))
        self._last: tuple[str, list[int]] = ("", self._tokenizer.encode("").ids)

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def width(self) -> int:
        return self._width

    def tokens(self, text: str) -> int:
        return len(self._ids(text)) - self._marks

    def embed(self, text: str) -> Vector:
        """Raises ValueError beyond the model's window."""
        return self._encode(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        """Memoizes the last text, since most are counted first and embedded next."""
        if self._last[0] != text:
            self._last = (text, self._tokenizer.encode(text).ids)
        return self._last[1]


def open_embedder(folder: Path) -> ModelEmbedder:
    """The fastest runtime that the folder has and this machine supports."""
    made = json.loads((folder / MANIFEST).read_text())["runtimes"]
    if NATIVE in made and not lacking():
        try:
            found = native_embedder(folder)
            log.info("cache: the embedder runs in C")
            return found
        except OSError as error:  # such as a folder mounted noexec
            log.warning("cache: the embedder is left to onnxruntime: %s", error)
    log.info("cache: the embedder runs under onnxruntime")
    return onnx_embedder(folder)


def native_embedder(folder: Path) -> ModelEmbedder:
    """Raises OSError where the folder has no encoder in C."""
    return _embedder(folder, NATIVE, NativeEncoder(folder))


def onnx_embedder(folder: Path) -> ModelEmbedder:
    import onnxruntime  # type: ignore[import-untyped, import-not-found, unused-ignore]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session: Any = onnxruntime.InferenceSession(str(folder / MODEL), options, providers=["CPUExecutionProvider"])

    def encode(ids: Sequence[int]) -> Vector:
        vector: Vector = session.run(None, {"ids": np.array([ids], np.int64)})[0]
        return vector

    return _embedder(folder, ONNX, encode)


def _embedder(folder: Path, runtime: str, encode: Callable[[Sequence[int]], Vector]) -> ModelEmbedder:
    manifest = json.loads((folder / MANIFEST).read_text())
    return ModelEmbedder(folder, str(manifest["runtimes"][runtime]["digest"]), int(manifest["width"]), encode)
