"""Detects the machine's hardware, and chooses device and dtype by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from engine.cores import usable_cores
from engine.errors import Unsupported
from engine.settings import CPU_SEQUENCES, CUDA_BATCH_TOKENS, CUDA_SEQUENCES, PAGE_SIZE, Device, Dtype, TensorParallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPUINFO: Final = Path("/proc/cpuinfo")
LEAST_SEQUENCES, LEAST_TOKENS = 16, 256  # that run at once, and that each should have pages for
_PROMPT_SECONDS = 0.25
# Multiplications and additions a cycle of a multiprocessor in sixteen bits, from a compute capability on.
_OPERATIONS: Final = {(8, 0): 2048, (8, 6): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}
_CYCLES, _REACHED = 1.5e9, 0.6  # a second under load; the share of it all that a whole pass reaches
MOST_GPUS: Final = 8  # that a model is split over where nothing else was asked for
HIDE: Final = "CPU_HIDE_FEATURES"  # environment variable: flags of /proc/cpuinfo, with commas, to treat as absent


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Units of the instruction set, under their names in /proc/cpuinfo (x86 and Arm).

    All of the engine reads them here, so that what one CPU does can be tested on another: with made up flags, or in a
    whole process by hiding some (`HIDE`). That leaves alone what torch dispatches to, which ATEN_CPU_CAPABILITY=avx2
    and ONEDNN_MAX_CPU_ISA=AVX2 bound.
    """

    flags: frozenset[str]

    @property
    def bf16(self) -> bool:
        """Whether products of bfloat16 have instructions of their own, so that they are faster than in float32."""
        return not self.flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def cpu_features(cpuinfo: Path = CPUINFO) -> CpuFeatures:
    """Leaves out what `HIDE` names; none where they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return CpuFeatures(frozenset())
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return CpuFeatures(frozenset(flags).difference(os.environ.get(HIDE, "").replace(",", " ").split()))


def pick_device(wanted: Device) -> torch.device:
    """Raises Unsupported where CUDA is asked for and absent."""
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if wanted == "cuda":
        raise Unsupported("device cuda: no CUDA device is usable here; use device cpu or auto")
    return torch.device("cpu")


def pick_dtype(
    wanted: Dtype, stated: str | None, device: torch.device, cpu: CpuFeatures, quantized: bool = False
) -> torch.dtype:
    """Resolves auto: the checkpoint's own on a GPU, but bfloat16 around quantized weights, whose kernels read nothing
    else; on a CPU bfloat16 only where it is native, else float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cuda":
        own = dtype_of_gpu(stated, quantized)
        lacking = own == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if lacking else own
    narrow = stated not in (None, "float32")
    return torch.bfloat16 if narrow and cpu.bf16 else torch.float32


def dtype_of_gpu(stated: str | None, quantized: bool) -> torch.dtype:
    """Resolves auto for a GPU of compute capability 8.0 or later, whether it is here or not."""
    return torch.bfloat16 if quantized else torch.float32 if stated is None else DTYPES[stated]


def pick_ranks(
    wanted: TensorParallel, device: torch.device, useful: Callable[[int], bool], *, elsewhere: int = 0
) -> int:
    """Returns over how many processes a model is split, of which `elsewhere` are on other hosts. auto: one on a CPU; as
    many GPUs as there are and are of use. Raises Unsupported."""
    there = torch.cuda.device_count() if device.type == "cuda" else sys.maxsize
    if wanted == "auto":
        if device.type != "cuda":
            return 1
        return next((ranks for ranks in range(min(there, MOST_GPUS), 1, -1) if useful(ranks)), 1)
    if wanted - elsewhere > there:
        raise Unsupported(f"tensor-parallel {wanted}: {there} GPUs are visible; use fewer processes")
    return wanted


def why_no_peers(ranks: int) -> str | None:
    """Returns why the first `ranks` GPUs do not reach each other's memory."""
    kinds = {torch.cuda.get_device_properties(at).name for at in range(ranks)}
    if len(kinds) > 1:
        return f"the GPUs are of different kinds ({', '.join(sorted(kinds))})"
    for one in range(ranks):
        for other in range(ranks):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} does not reach the memory of GPU {other}"
    return None


def through_nccl(ranks: int, reason: str) -> str:
    """Returns the warning of a split model whose GPUs do not reach each other's memory."""
    return f"sums over {ranks} GPUs go through NCCL, and no step is captured: {reason}"


def pick_threads(wanted: int | None) -> int:
    """All cores but one: torch's threads wait for each other at every product, and one that shares its core with the
    front holds up all of them."""
    return wanted if wanted is not None else max(1, usable_cores() - 1)


def pick_walkers(wanted: int | None) -> int:
    """All cores: a thread of the walk in C that is off its core holds up no other (`engine/linear/walk.c`)."""
    return wanted if wanted is not None else usable_cores()


def most_sequences(device: torch.device) -> int:
    """How many run at once by default."""
    return CUDA_SEQUENCES if device.type == "cuda" else CPU_SEQUENCES


def with_pages(sequences: int, pages: int) -> int:
    """Halves `sequences` until each has pages for LEAST_TOKENS, but not below LEAST_SEQUENCES."""
    while sequences // 2 >= LEAST_SEQUENCES and pages * PAGE_SIZE < sequences * LEAST_TOKENS:
        sequences //= 2
    return sequences


def operations_per_second(device: torch.device) -> float:
    """Estimates a GPU's products in sixteen bits a second in a prompt."""
    found = torch.cuda.get_device_properties(device)
    return operations_of((found.major, found.minor), found.multi_processor_count)


def operations_of(capability: tuple[int, int], multiprocessors: int) -> float:
    known = [operations for least, operations in _OPERATIONS.items() if least <= capability]
    return (known or [min(_OPERATIONS.values())])[-1] * multiprocessors * _CYCLES * _REACHED


def batch_tokens(weights: int, operations: float) -> int:
    """Prompt tokens of a step by default. More at once is faster for prompts, and streams wait as long for their next
    token: a quarter of a second, where not even the least takes longer."""
    tokens, most = CUDA_BATCH_TOKENS
    while 2 * tokens <= most and 2 * weights * 2 * tokens <= _PROMPT_SECONDS * operations:
        tokens *= 2
    return tokens


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _cgroup_room())
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_room() -> int:
    """What a container's limit leaves; boundless where there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        return max(int((root / "memory.max").read_text()) - int((root / "memory.current").read_text()), 0)
    except (OSError, ValueError):
        return 1 << 62
