"""Other packages: how they are called, and what is said where they are missing. What they write is in the fixtures."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from quant import packages
from quant.errors import CannotQuantize


class Recorder:
    """Stands for a package's loaded model or tokenizer: it keeps what it was told."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(half=lambda: self.calls.update(half=((), {})))
        self.calls: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}

    def __getattr__(self, name: str):
        def call(*args: object, **kwargs: object) -> Recorder:
            self.calls[name] = (args, kwargs)
            return self

        return call


@pytest.fixture
def installed(monkeypatch):
    model, tokenizer = Recorder(), Recorder()
    transformers = SimpleNamespace(
        AutoTokenizer=tokenizer, AutoModelForCausalLM=model, BitsAndBytesConfig=lambda **given: given
    )
    monkeypatch.setitem(sys.modules, "awq", SimpleNamespace(AutoAWQForCausalLM=model))
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    return model, tokenizer


def test_autoawq_gets_the_group_and_all_of_the_calibration(installed, tmp_path):
    model, tokenizer = installed
    packages.run_autoawq(tmp_path / "m", tmp_path / "out", 64, torch.arange(12).view(3, 4))
    args, given = model.calls["quantize"]
    assert args == (tokenizer,)
    assert given["quant_config"] == {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    assert given["calib_data"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert (given["max_calib_samples"], given["max_calib_seq_len"]) == (3, 4)
    assert list(model.calls) == ["from_pretrained", "quantize", "half", "save_quantized"]
    assert model.calls["save_quantized"][0] == (str(tmp_path / "out"),)
    assert tokenizer.calls["save_pretrained"][0] == (str(tmp_path / "out"),)


def test_bitsandbytes_loads_in_eight_bits_and_saves(installed, tmp_path):
    model, tokenizer = installed
    packages.run_bitsandbytes(tmp_path / "m", tmp_path / "out")
    args, given = model.calls["from_pretrained"]
    assert args == (str(tmp_path / "m"),)
    assert given["quantization_config"] == {"load_in_8bit": True}
    assert model.calls["save_pretrained"][0] == tokenizer.calls["save_pretrained"][0] == (str(tmp_path / "out"),)


@pytest.mark.parametrize(
    ("module", "package", "call"),
    [
        ("awq", "autoawq", lambda path: packages.run_autoawq(path, path, 64, torch.zeros(1, 2))),
        ("bitsandbytes", "bitsandbytes", lambda path: packages.run_bitsandbytes(path, path)),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, module, package, call):
    monkeypatch.setitem(sys.modules, module, None)  # as an import finds a package that is not there
    with pytest.raises(CannotQuantize, match=rf"{package} cannot be imported.*pip install -e '\.\["):
        call(tmp_path)
