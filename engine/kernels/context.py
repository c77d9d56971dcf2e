"""What the driver keeps of a card's memory for a process, beside what is allocated."""

from __future__ import annotations

from engine.kernels.build import BuildError

STACK = 16  # bytes a thread, the least that the driver takes


def keep_little() -> None:
    """Gives back the stack that the driver keeps for every thread that the card can run: 1 KiB each, 260 MiB of an
    H100. It is meant for kernels whose need is unknown when they are compiled; there are none such here, and for all
    others the driver makes more room by itself. Raises BuildError."""
    from cuda.bindings import driver

    (status,) = driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, STACK)
    if int(status) != 0:
        raise BuildError(f"the stack of a thread cannot be made smaller: {status}")
