"""Reads a checkpoint's description of its own quantization, and which layers that covers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WHOLE_ROW = -1

AwqLayout = Literal["gemm", "gemv"]
GgufForm = Literal["int4", "minima", "int8"]


@dataclass(frozen=True, slots=True)
class AwqSpec:
    """Four bits as AutoAWQ packs them. `skip`: a layer whose name holds one of these strings stays dense."""

    layout: AwqLayout
    group: int
    skip: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"awq-{self.layout}"

    def covers(self, layer: str) -> bool:
        return ".layers." in f".{layer}" and not any(part in layer for part in self.skip)


@dataclass(frozen=True, slots=True)
class PackedScheme:
    targets: tuple[str, ...]
    bits: Literal[4, 8]
    group: int
    symmetric: bool


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """compressed-tensors `pack-quantized`. `ignore`: names, `re:` patterns or the class name Linear."""

    schemes: tuple[PackedScheme, ...]
    ignore: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "compressed-tensors"

    def scheme(self, layer: str) -> PackedScheme | None:
        """The scheme of the most specific target: exact name, then pattern, then class."""
        if any(_targets(rule, layer) for rule in self.ignore):
            return None
        ranked = [
            (_targets(target, layer), place)
            for place, scheme in enumerate(self.schemes)
            for target in scheme.targets
            if _targets(target, layer)
        ]
        return self.schemes[min(ranked)[1]] if ranked else None

    def covers(self, layer: str) -> bool:
        return self.scheme(layer) is not None


@dataclass(frozen=True, slots=True)
class Int8Spec:
    """Eight bits a row as bitsandbytes writes them. `skip`: whole name components that stay dense."""

    skip: tuple[str, ...] = ("lm_head",)

    @property
    def name(self) -> str:
        return "bitsandbytes-int8"

    def covers(self, layer: str) -> bool:
        return not any(f".{part}." in f".{layer}." for part in self.skip)


@dataclass(frozen=True, slots=True)
class GgufSpec:
    """Describes linears packed in llama.cpp's blocks. `kinds` maps each packed linear to the name of its block type.
    `exact` keeps four bits with minima as they are; it must be false on a GPU, which has no kernel for them."""

    kinds: Mapping[str, str] = field(hash=False)
    exact: bool = True

    @property
    def name(self) -> str:
        return "gguf"

    def covers(self, layer: str) -> bool:
        return layer in self.kinds

    def form(self, layer: str) -> GgufForm:
        """Returns the form that a covered layer takes in memory."""
        return self.form_of(self.kinds[layer])

    def form_of(self, kind: str) -> GgufForm:
        """Returns the form for blocks of this type. `int8` is lossy: it has one scale per row, and blocks have one per
        16 or 32 inputs."""
        if kind == "Q4_0":
            return "int4"
        return "minima" if kind in ("Q4_1", "Q4_K") and self.exact else "int8"


QuantSpec = AwqSpec | PackedSpec | Int8Spec | GgufSpec


def costly(pattern: str) -> bool:
    """Whether a `re:` pattern could take long on a layer's name: a repeated group, or many open repeats."""
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern)
    return len(pattern) > 512 or re.search(r"\)\s*[*+{]", bare) is not None or len(re.findall(r"[*+{]", bare)) > 6


def _targets(rule: str, layer: str) -> int:
    """0: no match; 1: exact name; 2: pattern, anchored at the start; 3: class name."""
    if rule == layer:
        return 1
    if rule.startswith("re:") and re.match(rule[3:], layer):
        return 2
    return 3 if rule == "Linear" else 0
