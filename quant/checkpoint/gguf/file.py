"""Reads a GGUF file as a model folder: its text files, and its tensors under a folder's names. Needs no torch."""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quant.checkpoint.config import ModelConfig, parse_config
from quant.checkpoint.errors import AGAIN, MEND, BadFile
from quant.checkpoint.fields import Fields
from quant.checkpoint.gguf.config import Positions, config_of, family_of, sampling_of
from quant.checkpoint.gguf.header import Header, Tensor, read_header
from quant.checkpoint.gguf.names import ROPE_FACTORS, TOKENS, file_name, folder_name
from quant.checkpoint.gguf.vocabulary import TOKENS as VOCABULARY
from quant.checkpoint.gguf.vocabulary import GgufVocabulary, vocabulary_of
from quant.checkpoint.regular import open_regular
from quant.checkpoint.tensors import dense_tensors

_MAX_FACTORS: Final = 4096  # bytes of the RoPE factors; a head has at most some hundred numbers


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Locates one tensor in the file and gives the order of its rows."""

    tensor: Tensor
    heads: int | None = None  # heads whose two halves alternate row by row; None: in a folder's order
    offset: float = 0.0  # what the file has added to the numbers of a folder


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Holds everything that a file contains except the numbers of its tensors."""

    texts: Mapping[str, bytes]  # file name in a folder → contents
    config: ModelConfig
    places: Mapping[str, FileTensor]  # tensor name in a folder → position


def is_gguf(model: Path) -> bool:
    """Returns whether the path ends in .gguf and is not a folder. Does not open the file."""
    return model.suffix.lower() == ".gguf" and not model.is_dir()


def gguf_file(file: Path) -> GgufFile:
    """Reads the file, or returns the cached result if its inode, size and mtime are unchanged. Raises BadFile, which
    names the key or the tensor."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise BadFile(file, f"cannot be read ({error.strerror})", "give the file of the model") from error
    return _read(file, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@functools.lru_cache(maxsize=2)  # the model and its draft model
def _read(file: Path, identity: tuple[int, ...]) -> GgufFile:
    header = read_header(file)
    fields = Fields(header.metadata, str(file))
    family = family_of(fields)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if TOKENS not in tensors or len(tensors[TOKENS].shape) != 2:
        raise BadFile(file, f"tensor {TOKENS} is missing or no matrix", AGAIN)
    factors = _factors(file, tensors[ROPE_FACTORS]) if ROPE_FACTORS in tensors else ()
    positions = Positions(tensors.keys(), tensors[TOKENS].shape[0], _dtype(header), factors)
    raw = config_of(fields, family, positions)
    vocabulary = vocabulary_of(fields, family.pre)
    if vocabulary.size > positions.rows:
        fields.refuse(VOCABULARY, f"has {vocabulary.size} tokens, {TOKENS} {positions.rows} rows", MEND)
    special = {"bos_token_id": vocabulary.bos, "eos_token_id": list(vocabulary.ends) or None}
    raw |= special
    config = parse_config(raw, str(file))
    places = _places(file, header, config, family.paired_rows)
    return GgufFile(_texts(raw, {**special, **sampling_of(fields)}, vocabulary), config, places)


def _texts(config: dict[str, Any], generation: dict[str, Any], vocabulary: GgufVocabulary) -> dict[str, bytes]:
    objects = {
        "config.json": config,
        "generation_config.json": {key: value for key, value in generation.items() if value is not None},
        "tokenizer.json": vocabulary.tokenizer,
        "tokenizer_config.json": vocabulary.settings,
    }
    made = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in objects.items()}
    return made | {name: template.encode() for name, template in vocabulary.templates.items()}


def _dtype(header: Header) -> str:
    """Returns the `torch_dtype` of the config: the type of the matrices if all are plain numbers of one type, otherwise
    bfloat16."""
    kinds = {tensor.kind.name for tensor in header.tensors if len(tensor.shape) > 1}
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return plain.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _factors(file: Path, tensor: Tensor) -> tuple[float, ...]:
    if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.size > _MAX_FACTORS:
        raise BadFile(file, f"tensor {ROPE_FACTORS} must be a short row of F32", MEND)
    with open_regular(file) as opened:
        opened.seek(tensor.start)
        data = opened.read(tensor.size)
    if len(data) < tensor.size:
        raise BadFile(file, f"tensor {ROPE_FACTORS} was cut short while it was read", AGAIN)
    return struct.unpack(f"<{tensor.size // 4}f", data)


def _places(file: Path, header: Header, config: ModelConfig, paired_rows: bool) -> dict[str, FileTensor]:
    """Maps a folder's names to the file's tensors. Checks that the file has exactly the tensors and shapes that the
    config requires."""
    expected = dense_tensors(config)
    places: dict[str, FileTensor] = {}
    for tensor in header.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = folder_name(tensor.name, output_norms=config.output_norms)
        if name is None or name not in expected:
            raise BadFile(file, f"tensor {tensor.name[:80]!r} has no place in this model", "take another model")
        if tensor.shape != expected[name]:
            fault = f"tensor {tensor.name} has shape {list(tensor.shape)}, its config asks for {list(expected[name])}"
            raise BadFile(file, fault, AGAIN)
        if len(tensor.shape) == 1 and not tensor.kind.plain:
            raise BadFile(file, f"tensor {tensor.name} is in {tensor.kind.name}, which rows alone are not", AGAIN)
        offset = config.norm_offset if len(tensor.shape) == 1 and name.endswith("norm.weight") else 0.0
        places[name] = FileTensor(tensor, _paired(name, config) if paired_rows else None, offset)
    missing = next((name for name in expected if name not in places), None)
    if missing is not None:
        raise BadFile(file, f"tensor {file_name(missing, output_norms=config.output_norms)} is missing", AGAIN)
    return places


def _paired(name: str, config: ModelConfig) -> int | None:
    if ".self_attn.q_proj." in name:
        return config.heads
    return config.kv_heads if ".self_attn.k_proj." in name else None
