"""What kernels are made for: a GPU's numbers, whether it is here or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class GpuShape:
    """What definitions of kernels and their grids depend on."""

    multiprocessors: int
    shared: int  # bytes of shared memory that a block may ask for
    warpgroups: bool = False  # compute capability 9.0, whose products only its own code has
    overlap: bool = False  # from 9.0 on: launches of a chain may overlap


def gpu_shape(device: torch.device) -> GpuShape:
    """Of a CUDA device."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)  # its stub lacks what a block may ask for
    capability = found.major, found.minor
    return gpu_of(capability, found.multi_processor_count, found.shared_memory_per_block_optin)


def gpu_of(capability: tuple[int, int], multiprocessors: int, shared: int) -> GpuShape:
    """Of any GPU."""
    return GpuShape(multiprocessors, shared, warpgroups=capability == (9, 0), overlap=capability >= (9, 0))
