"""What all tests share: examples of property tests are the same in every run, unless someone goes exploring; threads
wait asleep, as they do in the engine process; what is marked `gpu` needs a card, and says so where there is none."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported

settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # seconds that other tests need not pay

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
