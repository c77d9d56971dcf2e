"""Starts the driver beside the imports: some tenths of a second that need no Python."""

from __future__ import annotations

import contextlib
import ctypes
from threading import Thread


def begin_context() -> None:
    """Makes the context of the first GPU in a background thread; without a GPU nothing. Later users report faults."""
    Thread(target=_make, name="driver", daemon=True).start()


def _make() -> None:
    with contextlib.suppress(OSError, AttributeError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
