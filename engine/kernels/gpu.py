"""Hardware numbers that kernels are made for, whether the GPU is here or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch


LARGEST_SHARED: Final = 227 << 10  # bytes of shared memory that a block may ask for, of any GPU


@dataclass(frozen=True, slots=True)
class GpuShape:
    multiprocessors: int
    shared: int  # bytes of shared memory that a block may ask for
    warpgroups: bool = False  # compute capability 9.0, whose products only its own code has
    overlap: bool = False  # from 9.0 on: launches of a chain may overlap


def gpu_shape(device: torch.device) -> GpuShape:
    import torch

    found: Any = torch.cuda.get_device_properties(device)  # its stub lacks what a block may ask for
    capability = found.major, found.minor
    return gpu_of(capability, found.multi_processor_count, found.shared_memory_per_block_optin)


def gpu_of(capability: tuple[int, int], multiprocessors: int, shared: int) -> GpuShape:
    return GpuShape(multiprocessors, shared, warpgroups=capability == (9, 0), overlap=capability >= (9, 0))


# Bytes of shared memory that a block may ask for, by compute capability.
SHARED: Final[Mapping[tuple[int, int], int]] = MappingProxyType(
    {
        (8, 0): 163 << 10,
        (8, 6): 99 << 10,
        (8, 9): 99 << 10,
        (9, 0): LARGEST_SHARED,
        (10, 0): LARGEST_SHARED,
        (12, 0): 99 << 10,
    }
)
# Multiprocessors that servers have, by compute capability. Kernels are made for a number of multiprocessors: a GPU that
# is not here (a part of one, say) compiles its own at its first start.
SERVERS: Final[Mapping[tuple[int, int], tuple[int, ...]]] = MappingProxyType(
    {
        (8, 0): (108, 56),  # A100, A30
        (8, 6): (84, 80, 72),  # A40, A10G, A10
        (8, 9): (142, 58),  # L40 and L40S, L4
        (9, 0): (132, 114, 78),  # H100 SXM and H200, H100 PCIe, H20
        (10, 0): (148,),  # B200
        (12, 0): (188, 170),  # RTX PRO 6000, RTX 5090
    }
)


def gpus_of(arch: str) -> tuple[tuple[tuple[int, int], GpuShape], ...]:
    """Shapes by capability of an architecture such as sm_90. Raises ValueError for others."""
    for capability, counts in SERVERS.items():
        if arch == f"sm_{capability[0]}{capability[1]}":
            return tuple((capability, gpu_of(capability, count, SHARED[capability])) for count in counts)
    known = ", ".join(f"sm_{major}{minor}" for major, minor in SERVERS)
    raise ValueError(f"architecture {arch!r}: one of {known}")
