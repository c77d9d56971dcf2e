"""Memory that the driver keeps on a GPU for a process, beside what is allocated."""

from __future__ import annotations

import logging

import torch

_log = logging.getLogger(__name__)
STACK = 16  # bytes a thread, the least that the driver takes


def keep_little(device: torch.device) -> None:
    """Gives back the stack that the driver keeps for every thread that the GPU can run: 1 KiB each, 260 MiB of an H100.
    It serves kernels of unknown need, of which we have none."""
    try:
        from cuda.bindings import driver
    except ImportError:  # the decoders that need it say so
        return
    torch.empty(1, device=device)  # so that there is a context
    (status,) = driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, STACK)
    if int(status) != 0:
        _log.warning("the driver keeps the stack that it reserved on %s: %s", device, status)
