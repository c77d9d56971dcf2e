"""A model folder's fingerprint: SHA-256 over what decides its answers, computed beside the load."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quant.checkpoint.errors import BadFile
from quant.checkpoint.gguf.file import gguf_file, is_gguf
from quant.checkpoint.regular import open_regular

READ_BYTES = 4 << 20
# What decides which ids a text becomes, and back, and where an answer ends.
TEXTS = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


class WeightsDigest:
    """Hashes files in threads of its own from construction on."""

    def __init__(self, files: Iterable[Path], threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
        ordered = sorted(files, key=lambda file: file.name)
        self._parts = [(file.name, self._pool.submit(_of_file, file)) for file in ordered]

    def result(self) -> str:
        """SHA-256 over the lines `file name, its SHA-256`, hexadecimal. Waits."""
        whole = hashlib.sha256()
        for name, part in self._parts:
            whole.update(f"{name} {part.result()}\n".encode())
        return whole.hexdigest()

    def close(self) -> None:
        """Ends the threads; what has not begun is not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def of_texts(folder: Path, names: tuple[str, ...] = TEXTS) -> str:
    """Returns the SHA-256 over one line `file name, its SHA-256` per file. A missing file and an empty file give
    different results. For a GGUF file, hashes the text files that its metadata is turned into."""
    whole = hashlib.sha256()
    if is_gguf(folder):
        texts = gguf_file(folder).texts
        for name in names:
            found = hashlib.sha256(texts[name]).hexdigest() if name in texts else "none"
            whole.update(f"{name} {found}\n".encode())
        return whole.hexdigest()
    for file in (folder / name for name in names):
        # is_file: nothing that could be waited for is opened, such as a FIFO
        whole.update(f"{file.name} {_of_file(file) if file.is_file() else 'none'}\n".encode())
    return whole.hexdigest()


def of_model(weights: str, texts: str) -> str:
    """Digests everything that decides what a model answers: its weights and its texts."""
    return f"sha256:{of_text(weights, texts)}"


def of_text(*parts: str) -> str:
    """SHA-256 of what stands in for weights that no file holds."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_file(file: Path) -> str:
    found = hashlib.sha256()
    try:
        with open_regular(file) as opened:
            while piece := opened.read(READ_BYTES):
                found.update(piece)
    except OSError as error:
        raise BadFile(file, f"cannot be read ({error.strerror})", "check its permissions") from error
    return found.hexdigest()
