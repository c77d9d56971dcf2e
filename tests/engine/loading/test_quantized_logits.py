"""Quantized checkpoints through the engine. The oracle is the same model as plain numbers, and the packages that wrote
the stored ones; packing is done value by value, from the format's description."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import InvalidModel
from engine.linear import DenseLinear
from engine.linear.cpu import Int4Cpu, Int8Cpu
from engine.linear.joined import JoinedLinear
from engine.worker import doctor
from engine.worker.build import build, prepare
from quant.checkpoint.config import parse_config
from quant.checkpoint.packed import write_packed
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.tensors import dense_tensors, linears
from quant.decoder import Decoder
from quant.recipes import AwqRecipe
from quant.rounding import round_groups
from quant.sensitivity import BitPlan
from tests.engine.quantized import (
    BASE,
    FAMILIES,
    ids_of,
    layers_of,
    logits_of,
    make,
    nothing,
    settings,
    write,
)

pytestmark = [pytest.mark.product, pytest.mark.isa]

STORED = Path(__file__).resolve().parents[2] / "quant" / "fixtures"


@pytest.mark.parametrize(
    ("name", "oracle", "exact"),
    [
        ("awq-tiny", "awq_dense_fp32", 2e-3),
        ("awq-tiny", "autoawq_fp16", 1e-2),
        ("bnb-int8-tiny", "int8_dense_fp32", 1e-4),
    ],
)
def test_checkpoints_of_the_packages_give_their_logits(name: str, oracle: str, exact: float) -> None:
    stored = load_file(STORED / "reference.safetensors")
    ids, expected = stored["input_ids"][0].tolist(), stored[oracle].float()
    found = logits_of(STORED / name, ids, dtype="float32")
    assert float((found - expected).abs().max()) < exact
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert torch.allclose(logits_of(STORED / name, ids, at_once=True, dtype="float32")[0], expected[-1], atol=exact)


@pytest.mark.proof
@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("name", ["awq-tiny", "bnb-int8-tiny"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_packed_kernels_stay_close_to_exact_logits(name: str, dtype: Any) -> None:
    stored = load_file(STORED / "reference.safetensors")
    ids = stored["input_ids"][0].tolist()
    expected = stored["awq_dense_fp32" if name == "awq-tiny" else "int8_dense_fp32"]
    found = logits_of(STORED / name, ids, dtype=dtype)
    error = found - expected
    assert float(error.abs().max()) < 0.1
    assert float(error.square().mean().sqrt()) < 0.02
    assert float((found.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", [32, 64])
def test_a_family_in_four_bits_equals_its_plain_self(family: str, group: int, tmp_path: Path) -> None:
    make(tmp_path, family, group)
    ids = ids_of(40)
    expected = logits_of(tmp_path / "plain", ids, dtype="float32")
    spread = float(expected.std())
    assert spread > 0.5
    found = logits_of(tmp_path / "awq", ids, dtype="float32")
    assert float((found - expected).abs().max()) < 1e-4 * spread
    assert isinstance(layers_of(tmp_path / "awq")[0].qkv, Int4Cpu)


@pytest.mark.parametrize(
    ("skip", "split"),
    [(("v_proj",), JoinedLinear), (("self_attn",), DenseLinear), (("layers.0.",), DenseLinear), (("mlp",), Int4Cpu)],
)
def test_what_was_not_converted_stays_plain(skip: tuple[str, ...], split: type, tmp_path: Path) -> None:
    make(tmp_path, "llama-biases", skip=skip)
    layer = layers_of(tmp_path / "awq")[0]
    assert isinstance(layer.qkv, split)
    ids = ids_of(20)
    expected = logits_of(tmp_path / "plain", ids, dtype="float32")
    found = logits_of(tmp_path / "awq", ids, dtype="float32")
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())


def test_shards_and_an_old_config_read_the_same(tmp_path: Path) -> None:
    config = make(tmp_path)
    expected = logits_of(tmp_path / "awq", ids_of(9))
    section = config.pop("quantization_config")
    held = load_file(tmp_path / "awq" / "model.safetensors")
    old = tmp_path / "old"
    old.mkdir()
    beside = {"w_bit": 4, "q_group_size": section["group_size"], "zero_point": True, "version": "GEMM"}
    (old / "quant_config.json").write_text(json.dumps(beside))
    (old / "config.json").write_text(json.dumps(config))
    names = sorted(held)
    weight_map = {name: f"model-{place % 3}.safetensors" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: held[name] for name in names if weight_map[name] == file}, old / file)
    (old / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(old, ids_of(9)), expected)
    assert prepare(settings(old), nothing).weight_format == "awq-int4-g32"


def test_outputs_that_fill_no_block_are_served_all_the_same(tmp_path: Path) -> None:
    make(tmp_path, group=8, num_key_value_heads=1, num_attention_heads=3, head_dim=8)
    layer = layers_of(tmp_path / "awq")[0]
    assert isinstance(layer.qkv, Int4Cpu)
    ids = ids_of(9)
    expected = logits_of(tmp_path / "plain", ids, dtype="float32")
    found = logits_of(tmp_path / "awq", ids, dtype="float32")
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())


def in_order(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, K] of 0…2**bits - 1 → int32 words, the first value lowest."""
    count = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        words |= values[:, place::count].long() << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def mixed(root: Path, eight: dict[int, tuple[str, ...]]) -> Path:
    """A folder as the quantizer writes it where some linears stay in eight bits; its plain self beside it."""
    config = {**BASE, **FAMILIES["qwen2-tied"]}
    parsed = parse_config(config, "config.json")
    seed = torch.Generator().manual_seed(8)
    plain = {name: torch.randn(shape, generator=seed).half() for name, shape in dense_tensors(parsed).items()}
    plain = {name: (one / one.shape[-1] ** 0.5 if one.dim() == 2 else one.abs() + 0.5) for name, one in plain.items()}
    held = dict(plain)
    for name, _, _ in linears(parsed):
        index, linear = name.removeprefix("model.layers.").split(".", 1)
        weight = held.pop(f"{name}.weight").float()
        rounded = round_rows(weight) if linear in eight.get(int(index), ()) else round_groups(weight, 32)
        held |= {f"{name}.{stem}": tensor for stem, tensor in write_packed(rounded).items()}
        plain[f"{name}.weight"] = rounded.dequantize(torch.float32)
    recipe = AwqRecipe(
        Decoder.open(write(root / "plain", config, plain)), BitPlan(32, eight, 5.0), torch.zeros(1, 1, 1), torch.ones(0)
    )
    return write(root / "mixed", recipe.config(config), held)


def test_four_and_eight_bits_in_one_folder(tmp_path: Path) -> None:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    folder = mixed(tmp_path, {0: (*qkv, "mlp.down_proj"), 1: ("mlp.gate_proj", "mlp.up_proj")})
    first, second = layers_of(folder)
    kinds = [type(one) for layer in (first, second) for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert kinds == [Int8Cpu, Int4Cpu, Int4Cpu, Int8Cpu, Int4Cpu, Int4Cpu, Int8Cpu, Int4Cpu]
    ids = ids_of(30)
    expected = logits_of(tmp_path / "plain", ids, dtype="float32")
    found = logits_of(folder, ids, dtype="float32")
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())
    assert prepare(settings(folder), nothing).weight_format == "compressed-tensors-int4-g32-int8"


def test_a_mixed_folder_whose_config_lies_is_refused(tmp_path: Path) -> None:
    folder = mixed(tmp_path, {0: ("mlp.down_proj",)})
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"]["targets"] = ["model.layers.1.mlp.down_proj"]  # it is in four bits
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=r"weight_packed"):
        layers_of(folder)


@pytest.mark.parametrize(("bits", "name"), [(4, "compressed-tensors-int4-g32"), (8, "compressed-tensors-int8")])
def test_compressed_tensors(bits: int, name: str, tmp_path: Path) -> None:
    config = {**BASE, **FAMILIES["llama-biases"]}
    parsed = parse_config(config, "config.json")
    seed = torch.Generator().manual_seed(5)
    plain = {key: torch.rand(shape, generator=seed) + 0.5 for key, shape in dense_tensors(parsed).items()}
    plain = {key: tensor - 1 if tensor.dim() == 2 else tensor for key, tensor in plain.items()}
    held, half = dict(plain), 1 << bits - 1
    for prefix, (inputs, rows), _ in linears(parsed):
        if prefix == "lm_head":
            continue
        q = torch.randint(1 - half, half, (rows, inputs), generator=seed)
        scale = (torch.rand(rows, inputs // 32 if bits == 4 else 1, generator=seed) + 0.5) / half / inputs**0.5
        del held[f"{prefix}.weight"]
        held[f"{prefix}.weight_packed"] = in_order(q + half, bits)
        held[f"{prefix}.weight_scale"] = scale
        held[f"{prefix}.weight_shape"] = torch.tensor([rows, inputs])
        plain[f"{prefix}.weight"] = q * scale.repeat_interleave(inputs // scale.shape[1], 1)
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if bits == 4 else "channel"}
    scheme = {"targets": ["Linear"], "weights": {**weights, "group_size": 32 if bits == 4 else None}}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    quantized = {**config, "quantization_config": {**section, "config_groups": {"group_0": scheme}}}
    folder = write(tmp_path / "packed", quantized, held)
    expected = logits_of(write(tmp_path / "plain", config, plain), ids_of(20), dtype="float32")
    found = logits_of(folder, ids_of(20), dtype="float32")
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())
    assert prepare(settings(folder), nothing).weight_format == name
    del held["model.layers.0.mlp.down_proj.weight_scale"]
    with pytest.raises(InvalidModel, match=r"down_proj\.weight_scale: expected .* found no such tensor;"):
        prepare(settings(write(tmp_path / "broken", quantized, held)), nothing)


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_eight_bits_made_while_loading(source: str, tmp_path: Path) -> None:
    make(tmp_path, "qwen2-tied")
    held = load_file(tmp_path / "plain" / "model.safetensors")
    config = {**BASE, **FAMILIES["qwen2-tied"], "torch_dtype": source}
    plain = {name: tensor.to(getattr(torch, source)) for name, tensor in held.items()}
    folder = write(tmp_path / "source", config, plain)
    rounded = {}
    for name, tensor in plain.items():
        rounded[name] = tensor.float()
        if "proj.weight" in name:
            # The scale is a bfloat16 at or just above a 127th of the row's largest.
            step = tensor.float().abs().amax(1, keepdim=True) / 127
            up = torch.nextafter(step.to(torch.bfloat16), torch.tensor(torch.inf, dtype=torch.bfloat16)).float()
            near = step.to(torch.bfloat16).float()
            step = torch.where(near >= step, near, up)
            rounded[name] = (tensor.float() / step).round() * step
    expected = logits_of(write(tmp_path / "rounded", config, rounded), ids_of(20), dtype="float32")
    exact = logits_of(folder, ids_of(20), dtype="float32", quantization="int8")
    assert float((exact - expected).abs().max()) < 1e-4 * float(expected.std())
    prepared = prepare(settings(folder, quantization="int8"), nothing)
    assert isinstance(prepared.parts.model.weights.layers[0].down, Int8Cpu)
    assert prepared.weight_format == "int8"
    plainly = prepare(settings(folder), nothing)
    assert plainly.weight_format == "dense"
    assert plainly.digest != prepared.digest


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize(
    ("section", "quantization", "form", "kind"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, "auto", "awq-int4-g64", Int4Cpu),
        ({"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemm"}, "auto", "awq-int4-row", Int4Cpu),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "auto", "bitsandbytes-int8", Int8Cpu),
        (None, "int8", "int8", Int8Cpu),
    ],
)
def test_random_weights_come_packed(
    section: dict[str, Any] | None, quantization: Any, form: str, kind: type, tmp_path: Path
) -> None:
    config = {**BASE, **FAMILIES["qwen3"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    if section is not None:
        config["quantization_config"] = section
    folder = tmp_path / "dummy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    given: dict[str, Any] = {"load_format": "dummy", "quantization": quantization}
    prepared = prepare(settings(folder, **given), nothing)
    again, other = (prepare(settings(folder, seed=seed, **given), nothing) for seed in (0, 1))
    assert (prepared.weight_format, prepared.digest) == (form, again.digest)
    assert prepared.digest != other.digest
    assert prepared.parts.model.placement.dtype in (torch.float32, torch.bfloat16)
    assert isinstance(prepared.parts.model.weights.layers[0].gate_up, kind)
    found = [logits_of(folder, ids_of(9, 512), seed=seed, **given) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    plain = logits_of(folder, ids_of(9, 512), load_format="dummy") if section is None else found[0]
    assert 0.3 < float(found[0].std() / plain.std()) < 3
    assert 0.3 < float(found[0].std()) < 10


@pytest.mark.proof
@pytest.mark.usefixtures("bf16_units")
def test_the_doctor_tells_what_building_comes_to(tmp_path: Path) -> None:
    make(tmp_path)
    cases = ((tmp_path / "awq", "auto"), (tmp_path / "plain", "int8"), (tmp_path / "plain", "auto"))
    for folder, quantization in cases:
        asked = replace(settings(folder), quantization=quantization)
        report = doctor.examine(asked)
        runner = build(asked, nothing)
        info = runner.info
        runner.close()
        assert report.problems == []
        assert report.model is not None
        assert report.model.weight_format == info.weight_format
        assert [one.name for one in report.formats if one.chosen] == [info.weight_format]
        assert all(one.reason for one in report.formats if not one.chosen)
        assert report.model.weights_bytes == pytest.approx(info.weights_bytes, rel=0.05)
    (problem,) = doctor.examine(replace(settings(tmp_path / "awq"), quantization="int8")).problems
    assert "already" in problem
