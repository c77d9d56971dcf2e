"""GPUs by name, with what their drivers and data sheets state, so that serving can be planned for one that is not
here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine.errors import Unsupported
from engine.kernels.gpu import SHARED, GpuShape, gpu_of


@dataclass(frozen=True, slots=True)
class KnownGpu:
    title: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_mib: int  # in all, as its driver reports
    bandwidth: int  # GB/s of its memory, by its data sheet

    @property
    def architecture(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    @property
    def shape(self) -> GpuShape:
        return gpu_of(self.capability, self.multiprocessors, SHARED[self.capability])


# By the name that `doctor --gpu` takes.
KNOWN: Final[Mapping[str, KnownGpu]] = MappingProxyType(
    {
        "rtx-3060": KnownGpu("GeForce RTX 3060", (8, 6), 28, 12288, 360),
        "rtx-3070": KnownGpu("GeForce RTX 3070", (8, 6), 46, 8192, 448),
        "rtx-3090": KnownGpu("GeForce RTX 3090", (8, 6), 82, 24576, 936),
        "rtx-4060": KnownGpu("GeForce RTX 4060", (8, 9), 24, 8188, 272),
        "rtx-4070": KnownGpu("GeForce RTX 4070", (8, 9), 46, 12282, 504),
        "rtx-4080": KnownGpu("GeForce RTX 4080", (8, 9), 76, 16376, 717),
        "rtx-4090": KnownGpu("GeForce RTX 4090", (8, 9), 128, 24564, 1008),
        "rtx-5070": KnownGpu("GeForce RTX 5070", (12, 0), 48, 12227, 672),
        "rtx-5080": KnownGpu("GeForce RTX 5080", (12, 0), 84, 16303, 960),
        "rtx-5090": KnownGpu("GeForce RTX 5090", (12, 0), 170, 32607, 1792),
        "rtx-a6000": KnownGpu("RTX A6000", (8, 6), 84, 49140, 768),
        "rtx-pro-6000": KnownGpu("RTX PRO 6000 Blackwell", (12, 0), 188, 97887, 1792),
        "a10": KnownGpu("A10", (8, 6), 72, 23028, 600),
        "a30": KnownGpu("A30", (8, 0), 56, 24576, 933),
        "a40": KnownGpu("A40", (8, 6), 84, 46068, 696),
        "a100-40": KnownGpu("A100 40GB", (8, 0), 108, 40960, 1555),
        "a100-80": KnownGpu("A100 80GB SXM", (8, 0), 108, 81920, 2039),
        "l4": KnownGpu("L4", (8, 9), 58, 23034, 300),
        "l40s": KnownGpu("L40S", (8, 9), 142, 46068, 864),
        "h100": KnownGpu("H100 80GB SXM", (9, 0), 132, 81559, 3350),
        "h100-pcie": KnownGpu("H100 80GB PCIe", (9, 0), 114, 81559, 2039),
        "h200": KnownGpu("H200", (9, 0), 132, 143771, 4800),
        "b200": KnownGpu("B200", (10, 0), 148, 183359, 8000),
    }
)
# An architecture is planned for by one of its GPUs.
_ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {"sm_80": "a100-40", "sm_86": "a10", "sm_89": "l4", "sm_90": "h100", "sm_100": "b200", "sm_120": "rtx-5090"}
)


def known_gpu(name: str) -> KnownGpu:
    """Returns a GPU by its name or its architecture. Raises Unsupported for others."""
    word = name.lower().removesuffix("a") if name.lower().startswith("sm_") else name.lower()
    found = KNOWN.get(_ARCHITECTURES.get(word, word))
    if found is None:
        names = ", ".join([*KNOWN, *_ARCHITECTURES])
        raise Unsupported(f"gpu {name!r}: is not known; use one of {names}")
    return found
