"""Model folders as they come, whole and broken: each fault is one line that names a file and a remedy."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import InvalidModel, Unsupported
from engine.execution.runner import ModelRunner
from engine.settings import EngineSettings
from engine.worker.build import build
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
WEIGHTS = "model.safetensors"


def tensors(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = dense_tensors(parse_config(config, "config.json"))
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any] = CONFIG, held: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config) if held is None else held, folder / WEIGHTS)
    return folder


def load(folder: Path, **options: Any) -> ModelRunner:
    return build(EngineSettings(model=str(folder), device="cpu", **options), lambda stage, done, total: None)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    write(tmp_path)
    seen: list[tuple[str, int, int]] = []
    runner = build(EngineSettings(model=str(tmp_path), device="cpu"), lambda *told: seen.append(told))
    size = sum(tensor.nbytes for tensor in tensors().values())
    assert seen[-1] == ("weights", size, size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    # The norm of keys and of queries is kept once a head: one copy of 8 floats more in each of 2 layers.
    assert runner.info.weights_bytes == size + 2 * 8 * 4
    assert runner.info.dtype == "float32"
    assert runner.info.architecture == "Qwen3ForCausalLM"


def test_digest_is_that_of_the_files(tmp_path: Path) -> None:
    write(tmp_path)
    lines = "".join(
        f"{name} {hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}\n" for name in ("config.json", WEIGHTS)
    )
    assert load(tmp_path).info.weights_digest == hashlib.sha256(lines.encode()).hexdigest()


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    one, same, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert one.info.weights_digest == same.info.weights_digest != other.info.weights_digest


Breakage = Callable[[Path], None]


def edit_config(**changes: Any) -> Breakage:
    def change(folder: Path) -> None:
        config = {**CONFIG, **changes}
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != ...}))

    return change


def drop(name: str) -> Breakage:
    return lambda folder: save_file({key: one for key, one in tensors().items() if key != name}, folder / WEIGHTS)


def replace_tensor(name: str, tensor: torch.Tensor) -> Breakage:
    return lambda folder: save_file({**tensors(), name: tensor}, folder / WEIGHTS)


def cut(size: int) -> Breakage:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])

    return change


def grow(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 9)


def header(body: bytes, length: int | None = None) -> Breakage:
    def change(folder: Path) -> None:
        size = len(body) if length is None else length
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + body)

    return change


def pickles_only(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def index(weight_map: object) -> Breakage:
    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def entry(**fields: Any) -> Breakage:
    full = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}
    return header(json.dumps({"a": full}).encode())


BROKEN: dict[str, tuple[Breakage, str, str]] = {
    # what is broken, the file it must name, a word of the reason or remedy
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json", "no such file"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json", "not valid JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json", "no JSON object"),
    "config is deep": (lambda folder: (folder / "config.json").write_text("[" * 99999), "config.json", "JSON"),
    "unknown architecture": (edit_config(architectures=["MambaForCausalLM"]), "config.json", "LlamaForCausalLM"),
    "no architecture": (edit_config(architectures=...), "config.json", "architectures"),
    "no hidden size": (edit_config(hidden_size=...), "config.json", "hidden_size"),
    "hidden size is text": (edit_config(hidden_size="16"), "config.json", "hidden_size"),
    "no layers": (edit_config(num_hidden_layers=0), "config.json", "num_hidden_layers"),
    "a billion layers": (edit_config(num_hidden_layers=10**9), "config.json", "num_hidden_layers"),
    "heads do not divide": (edit_config(num_attention_heads=3, num_key_value_heads=2), "config.json", "divide"),
    "odd head": (edit_config(head_dim=7), "config.json", "head_dim"),
    "gelu": (edit_config(hidden_act="gelu"), "config.json", "hidden_act"),
    "longrope": (edit_config(rope_scaling={"rope_type": "longrope"}), "config.json", "'longrope' is not served"),
    "rope factor missing": (edit_config(rope_scaling={"rope_type": "linear"}), "config.json", "factor"),
    "rope factor below one": (edit_config(rope_scaling={"type": "linear", "factor": 0.5}), "config.json", "factor"),
    "partial rotary": (edit_config(partial_rotary_factor=0.5), "config.json", "partial_rotary_factor"),
    "rope by layer": (
        edit_config(rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "config.json",
        "rope_parameters",
    ),
    "infinite theta": (edit_config(rope_theta=float("inf")), "config.json", "rope_theta"),
    "strange layer types": (edit_config(layer_types=["full_attention", "mamba"]), "config.json", "layer_types"),
    "sliding layers without window": (edit_config(layer_types=["sliding_attention"] * 2), "config.json", "layer_types"),
    "experts": (edit_config(num_experts=8), "config.json", "num_experts"),
    "strange dtype": (edit_config(torch_dtype="int8"), "config.json", "dtype"),
    "quantization unknown": (edit_config(quantization_config={"quant_method": "gptq"}), "config.json", "gptq"),
    "quantization is text": (edit_config(quantization_config="awq"), "config.json", "quantization_config"),
    "no weights": (no_weights, WEIGHTS, "download"),
    "pickles only": (pickles_only, "pytorch_model.bin", "safetensors"),
    "tensor missing": (drop("model.norm.weight"), "", "model.norm.weight is missing"),
    "wrong shape": (replace_tensor("model.norm.weight", torch.ones(17)), WEIGHTS, "model.norm.weight has shape [17]"),
    "surplus bias": (
        replace_tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(16)),
        WEIGHTS,
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "integers for weights": (replace_tensor("model.norm.weight", torch.ones(16).int()), WEIGHTS, "quantization_config"),
    "empty file": (cut(0), WEIGHTS, "truncated"),
    "cut in the length": (cut(5), WEIGHTS, "truncated"),
    "cut in the header": (cut(40), WEIGHTS, "truncated"),
    "cut in the data": (cut(3000), WEIGHTS, "truncated"),
    "too long": (grow, WEIGHTS, "longer"),
    "header length of 2⁶³": (header(b"{}", 1 << 63), WEIGHTS, "truncated"),
    "header is no JSON": (header(b"{]}"), WEIGHTS, "corrupt"),
    "header is no text": (header(b"\xff\xfe\xfd"), WEIGHTS, "corrupt"),
    "header is a list": (header(b"[1]"), WEIGHTS, "corrupt"),
    "header is deep": (header(b"[" * 50000), WEIGHTS, "corrupt"),
    "entry is null": (header(b'{"a": null}'), WEIGHTS, "corrupt"),
    "unknown type": (entry(dtype="F8_E4M3"), WEIGHTS, "F8_E4M3"),
    "offsets disagree": (entry(data_offsets=[0, 4]), WEIGHTS, "corrupt"),
    "offsets backwards": (entry(data_offsets=[8, 0]), WEIGHTS, "corrupt"),
    "negative shape": (entry(shape=[-2]), WEIGHTS, "corrupt"),
    "huge shape": (entry(shape=[1 << 61, 1 << 61]), WEIGHTS, "corrupt"),
    "shape of booleans": (entry(shape=[True, 2]), WEIGHTS, "corrupt"),
    "data beyond the end": (entry(), WEIGHTS, "truncated"),
    "index without map": (index(None), "model.safetensors.index.json", "weight_map"),
    "index names a missing shard": (index({"a": "model-2.safetensors"}), "model-2.safetensors", "download"),
    "index leaves the folder": (index({"a": "../model.safetensors"}), "index.json", "this folder"),
    "index names a pickle": (index({"a": "model.bin"}), "index.json", "safetensors"),
    "index and shard disagree": (index({"zz": WEIGHTS}), WEIGHTS, "zz"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    breakage, file, word = BROKEN[name]
    write(tmp_path)
    breakage(tmp_path)
    with pytest.raises(InvalidModel) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    assert str(tmp_path) in message
    assert file in message
    assert word in message
    assert ";" in message  # fault; remedy


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="no such file"):
        load(tmp_path / "nowhere")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model-extra.safetensors")
    with pytest.raises(InvalidModel, match=r"model\.norm\.weight is also in"):
        load(tmp_path)


def test_what_old_checkpoints_carry_along_is_no_fault(tmp_path: Path) -> None:
    held = tensors()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()  # of a tied head
    write(tmp_path, held=held)
    assert load(tmp_path).info.vocab_size == 64


def test_settings_that_cannot_hold_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    for options, word in (
        ({"max_context": 65}, "64 tokens"),
        ({"kv_bytes": 10}, "kv_bytes"),
        ({"max_context": 64, "kv_bytes": 4096}, "kv_bytes"),
    ):
        with pytest.raises(Unsupported, match=word):
            load(tmp_path, **options)


@pytest.mark.parametrize("hidden", [1 << 20, 1 << 30])
def test_a_model_larger_than_memory_is_refused_in_one_line(hidden: int, tmp_path: Path) -> None:
    huge = {**CONFIG, "vocab_size": 1 << 31, "hidden_size": hidden}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    with pytest.raises(Unsupported, match="does not fit") as caught:
        load(tmp_path, load_format="dummy")
    assert len(str(caught.value).splitlines()) == 1


def test_cuda_is_refused_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="no CUDA device"):
        build(EngineSettings(model=str(tmp_path), device="cuda"), lambda stage, done, total: None)


def test_the_pool_is_no_larger_than_its_sequences_need(tmp_path: Path) -> None:
    write(tmp_path)
    info = load(tmp_path, max_sequences=3, max_context=40).info
    assert (info.total_pages, info.max_context, info.max_sequences) == (9, 40, 3)
    # 2 · 2 layers · 1 head · 16 tokens · 8 · 4 bytes = 2048 a page
    small = load(tmp_path, kv_bytes=2 * 2048 + 100).info
    assert (small.total_pages, small.max_context) == (2, 32)


PEAK = """
import sys
from pathlib import Path
from engine.worker.build import build
from engine.settings import EngineSettings

def peak():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024

Path("/proc/self/clear_refs").write_text("5")
before = peak()
settings = EngineSettings(model=sys.argv[1], device="cpu", dtype="float32", threads=1, kv_bytes=1 << 20)
build(settings, lambda *told: None)
sys.stdout.write(str(peak() - before))
"""


@pytest.mark.proof
def test_weights_are_never_held_twice(tmp_path: Path) -> None:
    """Beside a small model, which loads the same code."""
    sizes, peaks, largest = [], [], 0
    for width in (64, 1024):
        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "vocab_size": 2048}
        held = {name: tensor.to(torch.bfloat16) for name, tensor in tensors({**CONFIG, **shape}).items()}
        folder = write(tmp_path / str(width), {**CONFIG, **shape}, held)
        command = [sys.executable, "-c", PEAK, str(folder)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        sizes.append(sum(tensor.nbytes * 2 for tensor in held.values()))  # as float32
        largest = max(tensor.nbytes for tensor in held.values())
    size, peak = sizes[1] - sizes[0], peaks[1] - peaks[0]
    assert 0.9 * size < peak < size + largest + (16 << 20), "one tensor of the file, and what the digest reads at once"
    assert size > 100 << 20
