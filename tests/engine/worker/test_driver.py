"""The driver's own start, with and without a driver."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

from engine.worker import driver

PATIENCE = 60.0  # seconds after which a test that waits has failed


@pytest.mark.parametrize("found", [0, 100])  # CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE
def test_a_context_is_made_where_there_is_a_device(found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def answers(name: str, code: int) -> object:
        return lambda *given: called.append(name) or code

    names = {"cuInit": found, "cuDeviceGet": 0, "cuDevicePrimaryCtxRetain": 0}
    library = SimpleNamespace(**{name: answers(name, code) for name, code in names.items()})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    driver._make()
    assert called == ([*names] if found == 0 else ["cuInit"])


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def missing(name: str) -> object:
        tried.set()
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver.begin_context()
    assert tried.wait(PATIENCE)
