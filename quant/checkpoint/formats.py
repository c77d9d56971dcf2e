"""Finds which quantization a model folder has, and names each format."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from quant.checkpoint.config import CONFIG
from quant.checkpoint.detect import detect
from quant.checkpoint.errors import BadConfig, BadFile, UnsupportedFormat
from quant.checkpoint.fields import read_json
from quant.checkpoint.gguf.file import gguf_file, is_gguf
from quant.checkpoint.reading import read_config
from quant.checkpoint.spec import WHOLE_ROW, AwqSpec, GgufSpec, Int8Spec, PackedScheme, QuantSpec
from quant.checkpoint.tensors import EMBEDDING

BESIDE: Final = "quant_config.json"  # where older writers put what config.json holds today
DENSE: Final = "dense"
INT8: Final = "int8"  # eight bits made while loading
FORMATS: Final = (DENSE, "awq-int4", "compressed-tensors", "bitsandbytes-int8", "gguf", INT8)


def read_spec(folder: Path, names: Collection[str] = ()) -> QuantSpec | None:
    """Reads the quantization format from a folder's JSON files or the header of a GGUF file. Returns None if the
    weights are not quantized. `names` are the folder's tensors, if known. Raises BadFile for a format that is not
    served."""
    if is_gguf(folder):
        return _gguf(folder)
    config = read_config(folder)
    beside = read_json(folder / BESIDE, "mend or remove the file") if os.path.lexists(folder / BESIDE) else None
    own = config.get("quantization_config") is not None or config.get("compression_config") is not None
    file = folder / (CONFIG if own or beside is None else BESIDE)
    try:
        return detect(config, beside, names)
    except UnsupportedFormat as error:
        raise BadFile(file, f"{error.name} cannot be served", error.remedy) from error
    except BadConfig as error:
        raise BadFile(file, str(error), "mend the config") from error


def described_by(folder: Path) -> tuple[Path, ...]:
    """Lists the JSON files that decide how the weight files are interpreted. A GGUF file needs none."""
    if is_gguf(folder):
        return ()
    return tuple(folder / name for name in (CONFIG, BESIDE) if (folder / name).is_file())


def format_name(spec: QuantSpec | None) -> str:
    """`dense`; `awq-int4-g128` (`-row`: one group a row); `compressed-tensors-int4-g128` or `-int8`;
    `bitsandbytes-int8`; `gguf-q4_k+q6_k-as-int8`."""
    if spec is None:
        return DENSE
    if isinstance(spec, AwqSpec):
        return f"awq-int4-{_group(spec.group)}"
    if isinstance(spec, Int8Spec):
        return spec.name
    if isinstance(spec, GgufSpec):
        return f"gguf-{'+'.join(_kind(spec, kind) for kind in sorted(set(spec.kinds.values())))}"
    return "-".join((spec.name, *dict.fromkeys(_scheme(scheme) for scheme in spec.schemes)))


def _gguf(file: Path) -> GgufSpec | None:
    places = gguf_file(file).places.items()
    held = {name: place.tensor.kind for name, place in places if name != EMBEDDING}
    kinds = {name.removesuffix(".weight"): kind.name for name, kind in held.items() if not kind.plain}
    return GgufSpec(kinds) if kinds else None


def _kind(spec: GgufSpec, kind: str) -> str:
    return f"{kind.lower()}-as-int8" if spec.form_of(kind) == "int8" else kind.lower()


def _scheme(scheme: PackedScheme) -> str:
    return "int8" if scheme.bits == 8 else f"int4-{_group(scheme.group)}"


def _group(size: int) -> str:
    return "row" if size == WHOLE_ROW else f"g{size}"
