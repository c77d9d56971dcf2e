"""Linears of quantized weights on a GPU: the kernel and the plain way agree, for any number of rows."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.weights import to_matrix
from engine.linear.cuda import CudaKernels, CudaLinear
from quant.checkpoint.forms import Int4Groups, Int8Rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_and_plain_agree(form: str, bias: bool) -> None:
    rows, columns = 1040, 896
    weight: Int8Rows | Int4Groups
    if form == "int8":
        q = torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int8)
        weight = Int8Rows(q, torch.rand(rows, device="cuda") * 0.02)
    else:
        packed = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
        scale = (torch.rand(rows, columns // 64, device="cuda") * 0.02).half()
        zero = torch.randint(0, 16, (rows, columns // 64), device="cuda", dtype=torch.uint8)
        weight = Int4Groups(packed, scale, zero, 64)
    added = torch.randn(rows, device="cuda") if bias else None
    kernels = CudaKernels()
    fast, plain = CudaLinear(to_matrix(weight), added, kernels), CudaLinear(to_matrix(weight), added)
    exact = weight.dequantize(torch.float64)
    for tokens in (1, 9, 16, 40, 100, 300):
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        assert kernels.multiply(x, fast.matrix, added) is not None
        expected = x.double() @ exact.T + (0 if added is None else added.double())
        for one in (fast, plain):
            found = one(x)
            assert found.dtype == torch.bfloat16
            assert float((found.double() - expected).norm() / expected.norm()) < 4e-3
        strided = torch.randn(tokens, 2 * columns, device="cuda").bfloat16()[:, ::2]
        assert torch.equal(fast(strided), fast(strided.contiguous()))


def test_other_types_are_multiplied_the_plain_way() -> None:
    weight = Int8Rows(
        torch.randint(-128, 128, (64, 64), device="cuda", dtype=torch.int8), torch.ones(64, device="cuda")
    )
    linear = CudaLinear(to_matrix(weight), None, CudaKernels())
    x = torch.randn(5, 64, device="cuda")
    torch.testing.assert_close(linear(x), x @ weight.q.float().T, rtol=1e-4, atol=1e-2)
