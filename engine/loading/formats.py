"""Which form a folder's weights have and will have in memory, and what that form is called. Torch-free in itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidModel, Unsupported
from engine.model.fields import read_json
from engine.settings import Quantization
from quant.detect import detect
from quant.errors import QuantError, UnsupportedFormat
from quant.spec import WHOLE_ROW, AwqSpec, Int8Spec, PackedScheme, QuantSpec

DENSE = "dense"
SERVED = (DENSE, "awq-int4", "compressed-tensors", "bitsandbytes-int8", "int8")
CONFIG, BESIDE = "config.json", "quant_config.json"


@dataclass(frozen=True, slots=True)
class Format:
    """spec: how the folder keeps its weights, None where they are plain. int8: plain ones become eight bits while they
    are loaded."""

    spec: QuantSpec | None
    int8: bool = False

    @property
    def in_memory(self) -> QuantSpec | None:
        """What a linear is when it is loaded."""
        return Int8Spec() if self.int8 else self.spec

    @property
    def name(self) -> str:
        """`dense`; `awq-int4-g128` (`-row`: one group a row); `compressed-tensors-int4-g128` or `-int8`;
        `bitsandbytes-int8`; `int8` where they are quantized while loading."""
        if self.int8:
            return "int8"
        if self.spec is None:
            return DENSE
        if isinstance(self.spec, AwqSpec):
            return f"awq-int4-{_group(self.spec.group)}"
        if isinstance(self.spec, Int8Spec):
            return self.spec.name
        return "-".join((self.spec.name, *dict.fromkeys(_scheme(scheme) for scheme in self.spec.schemes)))


def read_format(folder: Path, quantization: Quantization, names: Collection[str] = ()) -> Format:
    """From the folder's JSON files; `names`: its tensors, where they are known. Raises InvalidModel for a format that
    is not served, Unsupported where `quantization` cannot hold."""
    config = read_json(folder / CONFIG, "give the folder that holds the model's config.json")
    beside = read_json(folder / BESIDE, "mend or remove the file") if (folder / BESIDE).is_file() else None
    own = config.get("quantization_config") is not None or config.get("compression_config") is not None
    file = folder / (CONFIG if own or beside is None else BESIDE)
    try:
        spec = detect(config, beside, names)
    except UnsupportedFormat as error:
        raise InvalidModel(f"{file}: {error.name} cannot be served; {error.remedy}") from error
    except QuantError as error:
        raise InvalidModel(f"{file}: {error}; mend the config") from error
    if quantization == "int8" and spec is not None:
        name = Format(spec).name
        raise Unsupported(f"quantization int8: {folder} holds {name} weights already; use auto, or the bf16 model")
    return Format(spec, int8=quantization == "int8")


def _scheme(scheme: PackedScheme) -> str:
    return "int8" if scheme.bits == 8 else f"int4-{_group(scheme.group)}"


def _group(size: int) -> str:
    return "row" if size == WHOLE_ROW else f"g{size}"
