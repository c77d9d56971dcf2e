"""Packs a tokenizer's files, so that callers can tokenize exactly as the server does."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidModel
from service.core.errors import Unimplemented
from service.core.text.files import ModelFiles

# What ids, texts and chats are made with, and what the model says about sampling. Nothing else leaves the folder.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip, the same bytes for the same files."""

    data: bytes
    sha256: str  # hexadecimal


class TokenizerArchive:
    """Made in a thread at the first request, and kept."""

    def __init__(self, folder: str | None, unchanged: Callable[[], bool], template: Path | None = None) -> None:
        """`unchanged`: whether the folder's files are still those that the server has read."""
        self._folder = folder
        self._template = template
        self._unchanged = unchanged
        self._thread = ThreadPoolExecutor(1, "tokenizer-archive")  # started when it is first used
        self._making = asyncio.Lock()
        self._made: Archive | None = None

    async def get(self) -> Archive:
        """Raises Unimplemented without a folder, InvalidModel where it has changed."""
        if self._folder is None:
            raise Unimplemented("", "this server has no model folder, and so no tokenizer files")
        async with self._making:
            if self._made is None:
                self._made = await asyncio.get_running_loop().run_in_executor(self._thread, self._make, self._folder)
            return self._made

    def _make(self, folder: str) -> Archive:
        files = ModelFiles(Path(folder), self._template)
        there = {name: files.read(name) for name in FILES if files.has(name)}
        if not self._unchanged():
            raise InvalidModel(f"{folder}: has changed since the server started; start the server again")
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in there.items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return Archive(data.getvalue(), hashlib.sha256(data.getvalue()).hexdigest())
