"""What the driver keeps, on a GPU: little, and kernels that need more still get it."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.context import STACK, keep_little

pytestmark = pytest.mark.gpu


def test_little_is_kept_and_more_is_there_when_it_is_needed() -> None:
    from cuda.bindings import driver

    device = torch.device("cuda", torch.cuda.current_device())
    keep_little(device)
    status, limit = driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE)
    assert int(status) == 0
    assert limit == STACK
    rows = torch.stack([torch.randperm(5000) for _ in range(64)]).float()  # no two alike: their order is one
    for found, expected in zip(rows.to(device).sort(), rows.sort(), strict=True):
        assert torch.equal(found.cpu(), expected)
    for found, expected in zip(rows.to(device).topk(40), rows.topk(40), strict=True):
        assert torch.equal(found.cpu(), expected)
