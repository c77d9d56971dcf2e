"""Hardware numbers that kernels are made for, whether the GPU is here or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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


# What servers have, by compute capability: multiprocessors of each, and bytes that a block may ask for. Kernels are
# made for a number of multiprocessors: a GPU that is not here (a part of one, say) compiles its own at its first start.
SERVERS: Mapping[tuple[int, int], tuple[tuple[int, ...], int]] = MappingProxyType(
    {
        (8, 0): ((108, 56), 163 << 10),  # A100, A30
        (8, 6): ((84, 80, 72), 99 << 10),  # A40, A10G, A10
        (8, 9): ((142, 58), 99 << 10),  # L40 and L40S, L4
        (9, 0): ((132, 114, 78), 227 << 10),  # H100 SXM and H200, H100 PCIe, H20
        (10, 0): ((148,), 227 << 10),  # B200
    }
)


def gpus_of(arch: str) -> tuple[tuple[tuple[int, int], GpuShape], ...]:
    """Shapes by capability of an architecture such as sm_90. Raises ValueError for others."""
    for capability, (counts, shared) in SERVERS.items():
        if arch == f"sm_{capability[0]}{capability[1]}":
            return tuple((capability, gpu_of(capability, count, shared)) for count in counts)
    known = ", ".join(f"sm_{major}{minor}" for major, minor in SERVERS)
    raise ValueError(f"architecture {arch!r}: one of {known}")
