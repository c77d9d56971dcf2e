"""Memory of a GPU that other processes' GPUs write, by CUDA's handles between processes."""

from __future__ import annotations

from typing import Any, Final

import torch

WORD: Final = 4  # bytes
NONE: Final = 0xFFFFFFFF  # a place without a word, as in `exchange.cuh`
HANDLE: Final = 64  # bytes
_PAGE: Final = 2 << 20  # bytes; smaller allocations may share one, which a handle names whole


class NoPeers(Exception):
    """The GPUs do not reach each other's memory; the message says why in one line."""


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoPeers(f"cuda.core is not installed: {error}") from error
    return driver


def allocate(words: int) -> int:
    """Allocates empty places in the GPU's memory for as long as the process lives. Returns the address. Raises
    NoPeers."""
    driver, size = _driver(), -(-words * WORD // _PAGE) * _PAGE
    status, address = driver.cuMemAlloc(size)
    _check(driver, status)
    _check(driver, *driver.cuMemsetD32(address, NONE, size // WORD))
    torch.cuda.synchronize()
    return int(address)


def handle_of(address: int) -> bytes:
    driver = _driver()
    status, handle = driver.cuIpcGetMemHandle(address)
    _check(driver, status)
    found: bytes = handle.reserved
    return found


def open_handle(handle: bytes) -> int:
    driver = _driver()
    named = driver.CUipcMemHandle()
    named.reserved = handle
    status, address = driver.cuIpcOpenMemHandle(named, int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
    _check(driver, status)
    return int(address)


def _check(driver: Any, status: Any) -> None:
    if int(status) != 0:
        raise NoPeers(f"the GPUs share no memory: {driver.CUresult(int(status)).name}")
