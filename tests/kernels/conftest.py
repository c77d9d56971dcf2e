"""The card and what runs on it. Tests marked `gpu` need both; without a card they say so."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.build import KernelLibrary, open_library
from engine.kernels.launch import Launcher


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Launcher()


@pytest.fixture(scope="session")
def library(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    return open_library(torch.cuda.get_device_capability(), tmp_path_factory.mktemp("cubins"))
