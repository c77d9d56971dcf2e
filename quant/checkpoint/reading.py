"""Reads the config of a model folder or of a GGUF file. Of a model that also takes images, reads that of its text part.
Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from quant.checkpoint.config import CONFIG, ModelConfig, parse_config
from quant.checkpoint.fields import read_json
from quant.checkpoint.gguf.file import gguf_file, is_gguf

# Architectures with a text part in `text_config`: the architecture of that part.
TEXT_PARTS: Final = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
# Keys that such a model states beside its text part.
_BESIDE: Final = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def load_config(folder: Path) -> ModelConfig:
    """Reads and checks the config of a model folder or of a GGUF file. Raises BadFile."""
    return parse_config(read_config(folder), str(folder / CONFIG))


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the `config.json` of a model folder, unchecked, or its equivalent made from a GGUF file's metadata.
    Raises BadFile."""
    if is_gguf(folder):
        found: dict[str, Any] = json.loads(gguf_file(folder).texts[CONFIG])
        return found
    return _text_part(read_json(folder / CONFIG, "give the folder that holds the model's config.json"))


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of the text part of a model that also takes images, and other configs unchanged."""
    names, text = raw.get("architectures"), raw.get("text_config")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in TEXT_PARTS or not isinstance(text, dict):
        return raw
    beside = {key: raw[key] for key in _BESIDE if key in raw}
    return {**text, **beside, "architectures": [TEXT_PARTS[names[0]]]}
