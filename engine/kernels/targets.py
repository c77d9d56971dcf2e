"""States which sources compile for which GPUs. Products of warpgroups have instructions that only code for compute
capability 9.0 has; elsewhere wrappers take other kernels. All else compiles for 8.0 and later: headers have the copy
engine and overlapping launches between `#if`."""

from __future__ import annotations

from typing import Final

from engine.kernels.gpu import GpuShape

TARGETS: Final = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
OF_WARPGROUPS: Final = ("gated_product", "gemm_wide", "plain_product", "prefill_attention_wide")
NO_WARPGROUPS: Final = "products of warpgroups need compute capability 9.0"


def why_not(source: str, gpu: GpuShape) -> str | None:
    """Returns why this source is not offered on a GPU of compute capability 8.0 or later."""
    return NO_WARPGROUPS if source in OF_WARPGROUPS and not gpu.warpgroups else None
