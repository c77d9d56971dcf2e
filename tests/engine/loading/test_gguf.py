"""GGUF files through the engine. The oracle is transformers' model with the numbers that the `gguf` package takes out
of the same blocks, and transformers' own reading of the file where that keeps all of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import InvalidModel, Unsupported
from engine.linear import DenseLinear
from engine.linear.cpu import Int4Cpu, Int8Cpu
from engine.linear.joined import JoinedLinear
from engine.loading.formats import read_folder
from engine.worker import doctor
from engine.worker.build import build, prepare
from engine.worker.shapes import shape_weights
from quant.checkpoint.rounding import round_rows
from tests.engine.quantized import ids_of, layers_of, logits_of, nothing, settings
from tests.quant.gguf_files import FAMILIES, config_of, model_type, write_model

pytestmark = pytest.mark.isa

AS_INT8 = ("Q6_K", "Q8_0")
Held = dict[str, torch.Tensor]


def expected_of(family: str, held: Held, ids: list[int], rounded: tuple[str, ...] = ()) -> torch.Tensor:
    """Logits of transformers' model. rounded: parts of names whose weights are served in eight bits."""
    own = AutoConfig.for_model(model_type(family), **config_of(family), attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(own, dtype=torch.float32).eval()
    served = {
        name: round_rows(tensor).dequantize(torch.float32) if any(part in name for part in rounded) else tensor
        for name, tensor in held.items()
    }
    missing, surplus = model.load_state_dict(served, strict=False)
    assert not surplus
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    spread = float(expected.std())
    assert spread > 0.1
    return float((found - expected).abs().max()) < 2e-4 * spread


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_its_numbers(family: str, kind: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "m.gguf", ids_of(40)
    held = write_model(path, family, kind)
    assert near(logits_of(path, ids, dtype="float32"), expected_of(family, held, ids))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_a_kind_gives_the_logits_of_its_numbers(kind: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "m.gguf", ids_of(24)
    held = write_model(path, "llama", kind)
    rounded = ("_proj.", "lm_head") if kind in AS_INT8 else ()
    found = logits_of(path, ids, dtype="float32")
    assert near(found, expected_of("llama", held, ids, rounded))
    assert near(logits_of(path, ids, at_once=True, dtype="float32"), found[-1:])


def test_kinds_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As llama.cpp's Q4_K_M has them; and what became of each is said."""
    path, ids = tmp_path / "m.gguf", ids_of(24)
    kinds = {"v_proj": "Q6_K", "lm_head": "Q6_K", "down": "Q8_0", "embed": "Q4_K", "o_proj": "F16", "proj": "Q4_K"}
    held = write_model(path, "llama", kinds)
    with caplog.at_level(logging.INFO):
        found = logits_of(path, ids, dtype="float32")
    assert near(found, expected_of("llama", held, ids, ("v_proj", "lm_head", "down_proj")))
    assert "8 in Q4_K as 4 bits (0 to 0 MiB, nothing lost); 1 in Q4_K as float32" in caplog.text
    assert "3 in Q6_K as int8 rows" in caplog.text
    assert "2 in Q8_0 as int8 rows" in caplog.text
    layer = layers_of(path, dtype="float32")[0]
    assert isinstance(layer.qkv, JoinedLinear)
    assert [type(part) for part in layer.qkv.parts] == [Int4Cpu, Int4Cpu, Int8Cpu]
    assert isinstance(layer.output, DenseLinear)
    assert isinstance(layer.gate_up, Int4Cpu)
    assert prepare(settings(path), nothing).weight_format == "gguf-q4_k+q6_k-as-int8+q8_0-as-int8"


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_transformers_own_reading(family: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "m.gguf", ids_of(24)
    write_model(path, family, "Q4_1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert near(logits_of(path, ids, dtype="float32"), expected)


def test_dtypes_and_the_small_step_to_them(tmp_path: Path, bf16_units: None) -> None:
    path, ids = tmp_path / "m.gguf", ids_of(24)
    write_model(path, "qwen3", "Q4_1")
    exact = logits_of(path, ids, dtype="float32")
    found = logits_of(path, ids, dtype="bfloat16")
    assert float((found - exact).abs().max()) < 0.05 * float(exact.std())


def test_what_a_gpu_would_hold(tmp_path: Path) -> None:
    """No kernel reads four bits with minima, so they are eight bits there, which the plan of shapes says as well."""
    path = tmp_path / "m.gguf"
    write_model(path, "llama", {"v_proj": "Q4_0", "proj": "Q4_1", "lm_head": "Q4_1"})
    config, form = read_folder(path, "auto")
    assert form.name == "gguf-q4_0+q4_1"
    assert form.on("cpu") == form
    assert form.on("cuda").name == "gguf-q4_0+q4_1-as-int8"
    small, large = (shape_weights(config, form.on(device), torch.bfloat16).nbytes for device in ("cpu", "cuda"))
    assert small < large
    layer = shape_weights(config, form.on("cuda"), torch.bfloat16).layers[0]
    assert isinstance(layer.qkv, JoinedLinear)
    assert not isinstance(layer.gate_up, JoinedLinear)


def test_doctor_says_what_would_be_served(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", "Q4_1")
    report = doctor.examine(settings(path), digest=True)
    assert report.problems == []
    assert report.model is not None
    assert report.model.weight_format == "gguf-q4_1"
    weights = prepare(settings(path), nothing).parts.model.weights.nbytes
    assert abs(report.model.weights_bytes / weights - 1) < 0.05
    assert [one.name for one in report.formats if one.chosen] == ["gguf-q4_1"]


def test_dummy_weights_have_its_forms(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", {"v_proj": "Q6_K", "proj": "Q4_1"})
    layer = layers_of(path, load_format="dummy")[0]
    assert isinstance(layer.gate_up, Int4Cpu)
    assert layer.gate_up.zero.dtype == torch.float16
    assert isinstance(layer.qkv, JoinedLinear)


def test_the_digest_changes_with_the_file(tmp_path: Path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write_model(one, "llama", "Q4_1")
    first = prepare(settings(one), nothing).digest
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    two.write_bytes(data)
    assert prepare(settings(two), nothing).digest != first


def test_plain_numbers_may_be_made_eight_bits_and_blocks_may_not(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.gguf", tmp_path / "packed.gguf"
    write_model(plain, "llama", "F16")
    write_model(packed, "llama", "Q8_0")
    assert isinstance(layers_of(plain, quantization="int8")[0].down, Int8Cpu)
    with pytest.raises(Unsupported, match=r"packed\.gguf holds gguf-q8_0-as-int8 weights already"):
        layers_of(packed, quantization="int8")


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", "Q4_1")
    reader = gguf.GGUFReader(path)
    tensor = next(one for one in reader.tensors if one.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # the float16 that is no number
    path.write_bytes(data)
    with pytest.raises(InvalidModel, match=r"m\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.q4_1: expected finite"):
        build(settings(path), nothing)


def test_a_draft_in_a_file_of_its_own(tmp_path: Path) -> None:
    path, draft = tmp_path / "m.gguf", tmp_path / "draft.gguf"
    write_model(path, "llama", "Q4_1")
    write_model(draft, "llama", "Q8_0", num_hidden_layers=1)
    given: dict[str, Any] = {"draft_model": str(draft), "speculation": True}
    assert prepare(settings(path, **given), nothing).parts.draft is not None
