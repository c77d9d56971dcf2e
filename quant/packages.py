"""Quantizing with AutoAWQ and bitsandbytes, where the user has installed them and names them with --engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from quant.errors import CannotQuantize


def run_autoawq(model: Path, out: Path, group: int, calibration: torch.Tensor) -> None:
    """AutoAWQ's own search. calibration: int [S, T].

    Its double scaling is off: that has no unscaled candidate. It searches in float32, since CPUs are slow in float16.
    """
    awq = _load("awq", "autoawq", "awq")
    transformers = _load("transformers", "transformers", "awq")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    loaded = awq.AutoAWQForCausalLM.from_pretrained(str(model), torch_dtype=torch.float32, device_map="cpu")
    loaded.quantize(
        tokenizer,
        quant_config={"zero_point": True, "q_group_size": group, "w_bit": 4, "version": "GEMM"},
        calib_data=calibration.tolist(),
        max_calib_samples=len(calibration),
        max_calib_seq_len=calibration.shape[1],
        n_parallel_calib_samples=8,
        duo_scaling=False,
    )
    loaded.model.half()
    loaded.save_quantized(str(out))
    tokenizer.save_pretrained(str(out))


def run_bitsandbytes(model: Path, out: Path) -> None:
    """LLM.int8() weights as bitsandbytes rounds and stores them."""
    _load("bitsandbytes", "bitsandbytes", "bnb")
    _load("accelerate", "accelerate", "bnb")
    transformers = _load("transformers", "transformers", "bnb")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(model), quantization_config=config, device_map="cpu", dtype="auto"
    )
    loaded.save_pretrained(str(out))
    transformers.AutoTokenizer.from_pretrained(str(model)).save_pretrained(str(out))


def _load(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CannotQuantize(
            f"the package {package} cannot be imported ({error}): in a checkout pip install -e '.[{extra}]', for a "
            f"wheel pip install 'FILE.whl[{extra}]', or leave the engine out"
        ) from error
