"""Reads the text side of a model folder. Every fault becomes InvalidModel: one line, the file and the remedy."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import InvalidModel
from quant.checkpoint.errors import BadFile
from quant.checkpoint.gguf.file import gguf_file, is_gguf

TEMPLATE = "chat_template.jinja"
TOOLS_TEMPLATE = "additional_chat_templates/tool_use.jinja"
MAX_BYTES = 64 * 2**20  # twice what the largest vocabularies take
REMEDY = "copy it again from where the model came from"


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder's text files, or the equivalent texts derived from a GGUF file's metadata. The file `template` replaces
    all chat templates."""

    folder: Path
    template: Path | None = None

    def refuse(self, name: str, problem: str, remedy: str = REMEDY) -> NoReturn:
        path = self.folder / name if self.template is None or name != TEMPLATE else self.template
        raise InvalidModel(f"{path}: {problem}; {remedy}")

    def read(self, name: str, remedy: str = REMEDY) -> bytes:
        """Reads a regular file of at most MAX_BYTES; a pipe or a device would never end."""
        if self.template is not None and name == TEMPLATE:
            return ModelFiles(self.template.parent).read(self.template.name, "name a file that holds a Jinja template")
        if is_gguf(self.folder):
            found = self._within()
            return found[name] if name in found else self.refuse(name, "no such text in this file", remedy)
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    self.refuse(name, "is no regular file", remedy)
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                self.refuse(name, f"is larger than {MAX_BYTES >> 20} MiB", remedy)
            return data
        except FileNotFoundError:
            if not self.folder.is_dir():
                self.refuse("", "no such folder", "give the folder that holds the model")
            self.refuse(name, "no such file", remedy)
        except OSError as error:
            self.refuse(name, f"cannot be read ({error.strerror})", "correct its type or its permissions")

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(name, "is not UTF-8 text")

    def text_or_none(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def has(self, name: str) -> bool:
        if self.template is not None and name in (TEMPLATE, TOOLS_TEMPLATE):
            return name == TEMPLATE
        return name in self._within() if is_gguf(self.folder) else (self.folder / name).exists()

    def _within(self) -> Mapping[str, bytes]:
        try:
            return gguf_file(self.folder).texts
        except BadFile as error:
            raise InvalidModel(str(error)) from error

    def object(self, name: str) -> dict[str, Any]:
        """Empty where there is no such file."""
        text = self.text_or_none(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.refuse(name, f"is not JSON ({one_line(error)})")
        if not isinstance(value, dict):
            self.refuse(name, "is not a JSON object")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """None where generation_config.json has none."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None  # 0 keeps all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def _number(files: ModelFiles, config: dict[str, Any], key: str, low: float, high: float) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or not low <= value <= high:
        problem = f"{key} is {json.dumps(value)}, not a number from {low:g} to {high:g}"
        files.refuse("generation_config.json", problem, "correct it or delete the line")
    return float(value)


def _whole(files: ModelFiles, config: dict[str, Any], key: str, low: int) -> int | None:
    value = _number(files, config, key, low, 2**31 - 1)
    if value is not None and value != int(value):
        files.refuse("generation_config.json", f"{key} is no whole number", "correct it or delete the line")
    return None if value is None else int(value)


def read_sampling(files: ModelFiles, config: dict[str, Any]) -> SamplingDefaults:
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        files.refuse("generation_config.json", "do_sample is neither true nor false", "correct it or delete the line")
    top_k = _whole(files, config, "top_k", -1)
    tiny = 1e-6
    return SamplingDefaults(
        do_sample=do_sample,
        temperature=_number(files, config, "temperature", 0, 100),
        top_k=None if top_k is None else max(0, top_k),
        top_p=_number(files, config, "top_p", tiny, 1),
        min_p=_number(files, config, "min_p", 0, 1),
        repetition_penalty=_number(files, config, "repetition_penalty", tiny, 100),
        max_new_tokens=_whole(files, config, "max_new_tokens", 1),
    )


def read_eos(files: ModelFiles, generation: dict[str, Any]) -> tuple[int, ...]:
    """Ids of generation_config.json, or of config.json where the former names none."""
    model = files.object("config.json")
    size = model.get("vocab_size")
    for name, config in (("generation_config.json", generation), ("config.json", model)):
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            files.refuse(name, "eos_token_id is neither a token id nor a list of them", "correct it")
        if isinstance(size, int) and any(item >= size for item in ids):
            files.refuse(name, f"an eos_token_id is beyond the vocabulary of {size}", "correct it")
        if ids:
            return tuple(ids)
    return ()
