"""The measure of bfloat16's rounding is what transformers computes."""

from __future__ import annotations

import pytest
import torch

from tests.engine.execution.test_eager import MODELS, prompts
from tests.engine.plain_qwen3 import PlainQwen3

pytestmark = pytest.mark.product


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_logits_are_those_of_transformers(dtype: torch.dtype, gap: float) -> None:
    """In bfloat16 to the bit on most processors; anywhere within what rounding in each layer changes."""
    from transformers import AutoModelForCausalLM  # seconds that workers without this test need not pay

    theirs = AutoModelForCausalLM.from_pretrained(MODELS / "demo", dtype=dtype, attn_implementation="eager")
    ids = prompts(1)[0]
    with torch.inference_mode():
        whole = theirs(torch.tensor([ids])).logits[0].float()
        ours = PlainQwen3(MODELS / "demo", dtype, "cpu").logits(ids)
    assert float((whole - ours).abs().max()) < gap
