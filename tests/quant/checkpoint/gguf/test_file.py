"""A whole GGUF file as a folder: its config, its table of tensors, its texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from quant.checkpoint.config import parse_config
from quant.checkpoint.digest import TEXTS, of_texts
from quant.checkpoint.errors import BadFile
from quant.checkpoint.formats import described_by, format_name, read_spec
from quant.checkpoint.gguf.config import shortest
from quant.checkpoint.gguf.file import gguf_file, is_gguf
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.opening import open_checkpoint
from quant.checkpoint.reading import load_config
from quant.checkpoint.tensors import dense_tensors
from tests.quant import gguf_files
from tests.quant.gguf_files import FAMILIES, SIZES, begun, config_of, factors, finish, write_model

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    held = write_model(path, family, "Q8_0")
    stated = {**config_of(family), "architectures": [ARCHITECTURES[gguf_files.model_type(family)]], "dtype": "bfloat16"}
    expected = parse_config(stated, "config.json")
    assert load_config(path) == expected
    assert gguf_file(path).config == expected
    assert set(gguf_file(path).places) == set(dense_tensors(expected)) == set(held)
    assert format_name(read_spec(path)) == "gguf-q8_0-as-int8"


def test_tensors_are_the_numbers_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    held = write_model(path, "llama-biases", {"embed": "Q8_0", "q_proj": "F16", "k_proj": "BF16"})
    source = open_checkpoint(path)
    assert isinstance(source, GgufTensors)
    for name, expected in held.items():
        assert torch.equal(source.tensor(name).float(), expected), name
        assert source.shape(name) == expected.shape
    assert source.file("lm_head.weight") == path
    source.close()
    assert described_by(path) == ()


@pytest.mark.parametrize(
    ("kinds", "dtype", "name"),
    [
        ("F32", "float32", "dense"),
        ("F16", "float16", "dense"),
        ("BF16", "bfloat16", "dense"),
        ({"embed": "Q8_0", "": "F16"}, "bfloat16", "dense"),
        ({"v_proj": "Q6_K", "": "Q4_K"}, "bfloat16", "gguf-q4_k+q6_k-as-int8"),
    ],
)
def test_types_and_the_name_of_the_format(kinds: Any, dtype: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", kinds)
    assert load_config(path).dtype == dtype
    assert format_name(read_spec(path)) == name


def test_texts_are_those_of_a_folder(tmp_path: Path) -> None:
    path, folder = tmp_path / "m.gguf", tmp_path / "folder"
    write_model(path, "llama", "Q4_1")
    folder.mkdir()
    for name, text in gguf_file(path).texts.items():
        (folder / name).write_bytes(text)
    assert of_texts(path) == of_texts(folder)
    assert of_texts(path, ("tokenizer.json",)) == of_texts(folder, ("tokenizer.json",))
    assert load_config(folder) == load_config(path)
    assert set(gguf_file(path).texts) <= set(TEXTS)


def test_a_file_is_read_once_and_again_once_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", "F32")
    first = gguf_file(path)
    assert gguf_file(path) is first
    write_model(path, "llama", "F16")
    os.utime(path, (1, 1))
    assert gguf_file(path).config.dtype == "float16"


def test_what_counts_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(tmp_path / "folder.gguf")
    assert is_gguf(tmp_path / "M.GGUF")
    assert not is_gguf(tmp_path / "model.safetensors")
    with pytest.raises(BadFile, match="cannot be read"):
        gguf_file(tmp_path / "none.gguf")


@pytest.mark.product
def test_no_torch_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", "Q4_1")
    program = (
        "import sys; from pathlib import Path; from quant.checkpoint.gguf.file import gguf_file; "
        f"gguf_file(Path({str(path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("number", [1e-5, 1e-6, 0.1, 10000.0, 500000.0, 1.0, 0.7, 32.0, 1 / 3])
def test_numbers_are_written_as_short_as_they_can_be(number: float) -> None:
    kept = float(np.float32(number))
    assert np.float32(shortest(kept)) == np.float32(number)
    assert len(repr(shortest(kept))) <= len(repr(kept))


def test_positions(tmp_path: Path) -> None:
    def scaling(change: Callable[[GGUFWriter], None], **more: Any) -> Any:
        path = tmp_path / "m.gguf"
        changed(path, change, **more)
        return json.loads(gguf_file(path).texts["config.json"])["rope_scaling"]

    def yarn(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_float32("llama.rope.scaling.yarn_beta_fast", 24.0)

    def linear(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(2.0)

    assert scaling(lambda writer: None) is None
    assert scaling(linear) == {"rope_type": "linear", "factor": 2.0}
    assert scaling(lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0)) == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert scaling(yarn) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 24.0,
    }
    for theta, factor in ((500000.0, 8.0), (500000.0, 32.0), (10000.0, 8.0)):
        config = config_of("llama3-rope", rope_theta=theta)
        config["rope_scaling"] = {**config["rope_scaling"], "factor": factor}
        found = scaling(
            lambda writer, config=config: writer.add_tensor("rope_freqs.weight", factors(config)), rope_theta=theta
        )
        assert found == config["rope_scaling"]


def test_sampling_of_the_file(tmp_path: Path) -> None:
    def sample(writer: GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.top_p", 0.95)

    path = tmp_path / "m.gguf"
    changed(path, sample)
    generation = json.loads(gguf_file(path).texts["generation_config.json"])
    assert {key: generation[key] for key in ("do_sample", "temperature", "top_k", "top_p")} == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def changed(
    path: Path,
    change: Callable[[GGUFWriter], None],
    without: str = "",
    shape: tuple[str, tuple[int, ...]] | None = None,
    family: str = "llama",
    **more: Any,
) -> None:
    """A small model with one thing changed: keys by the writer, tensors left out or of another shape."""
    config = config_of(family, num_hidden_layers=1, **more)
    writer = begun(path, family, config)
    change(writer)
    for name, size in gguf_files.shapes(family, config).items():
        name = gguf_files.file_name(name)
        size = shape[1] if shape is not None and shape[0] == name else size
        if name != without:
            writer.add_tensor(name, np.ones(size, dtype=np.float32))
    finish(writer)


def rekeyed(key: str, value: object) -> Callable[[GGUFWriter], None]:
    """Puts another value of the same type in a key's place, or takes the key away."""

    def change(writer: GGUFWriter) -> None:
        held = writer.kv_data[0][key]
        if value is None:
            del writer.kv_data[0][key]
        else:
            held.value = value

    return change


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an architecture that is not served": (
        {"change": rekeyed("general.architecture", "mamba")},
        "general.architecture: 'mamba' is not served",
    ),
    "no architecture": ({"change": rekeyed("general.architecture", None)}, "general.architecture: is missing"),
    "an adapter": ({"change": lambda w: w.add_type("adapter")}, "general.type: 'adapter' is no language model"),
    "a part": ({"change": lambda w: w.add_uint16("split.count", 3)}, "split.count: this is one part of several"),
    "experts": ({"change": lambda w: w.add_expert_count(8)}, "llama.expert_count: 8 is not served"),
    "a scale": ({"change": lambda w: w.add_logit_scale(0.5)}, "llama.logit_scale: 0.5 is not served"),
    "a scale that the family must have": (
        {"family": "granite", "change": rekeyed("granite.residual_scale", None)},
        "granite.residual_scale: is missing",
    ),
    "heads that are not rotated": (
        {"family": "granite", "change": lambda w: w.add_rope_scaling_finetuned(False)},
        "granite.rope.scaling.finetuned: heads that are not rotated are not served",
    ),
    "a soft cap": ({"change": lambda w: w.add_attn_logit_softcapping(50.0)}, "llama.attn_logit_softcapping: 50.0"),
    "attention of its own": (
        {"change": lambda w: w.add_uint32("llama.attention.sparse_window", 5)},
        "llama.attention.sparse_window: 5 is not served",
    ),
    "no size": ({"change": rekeyed("llama.embedding_length", None)}, "llama.embedding_length: is missing"),
    "no layers": ({"change": rekeyed("llama.block_count", 0)}, "llama.block_count: must be a whole number from 1"),
    "layers beyond all": ({"change": rekeyed("llama.block_count", 5000)}, "llama.block_count: must be a whole number"),
    "heads that do not divide": (
        {"change": rekeyed("llama.attention.head_count_kv", 3)},
        "llama.attention.head_count_kv: 8 heads do not divide among 3",
    ),
    "values of another length": (
        {"change": rekeyed("llama.attention.value_length", 16)},
        "llama.attention.value_length: 16 is not served beside heads of 32",
    ),
    "half of a head rotated": (
        {"change": rekeyed("llama.rope.dimension_count", 16)},
        "llama.rope.dimension_count: 16 is not served beside heads of 32",
    ),
    "no epsilon": (
        {"change": rekeyed("llama.attention.layer_norm_rms_epsilon", float("nan"))},
        "llama.attention.layer_norm_rms_epsilon: must be a finite number",
    ),
    "an unknown stretch": (
        {"change": lambda w: w.add_string("llama.rope.scaling.type", "longrope")},
        "llama.rope.scaling.type: 'longrope' is not served",
    ),
    "a sharpened stretch": (
        {"change": lambda w: w.add_float32("llama.rope.scaling.attn_factor", 1.5)},
        "llama.rope.scaling.attn_factor: 1.5 is not served",
    ),
    "factors of another model": (
        {"change": lambda w: w.add_tensor("rope_freqs.weight", np.linspace(1, 3, 16, dtype=np.float32))},
        "rope_freqs.weight: stretches positions otherwise than Llama 3",
    ),
    "too few factors": (
        {"change": lambda w: w.add_tensor("rope_freqs.weight", np.ones(5, dtype=np.float32))},
        "rope_freqs.weight: must hold 16 numbers",
    ),
    "factors that are none": (
        {"change": lambda w: w.add_tensor("rope_freqs.weight", np.full(16, np.nan, dtype=np.float32))},
        "rope_freqs.weight: must hold 16 numbers",
    ),
    "a tensor too many": (
        {"change": lambda w: w.add_tensor("blk.0.ssm_a.weight", np.ones(4, dtype=np.float32))},
        "tensor 'blk.0.ssm_a.weight' has no place in this model",
    ),
    "a layer too many": (
        {"change": lambda w: w.add_tensor("blk.1.attn_norm.weight", np.ones(256, dtype=np.float32))},
        "tensor 'blk.1.attn_norm.weight' has no place",
    ),
    "a tensor too few": ({"without": "blk.0.ffn_up.weight"}, "tensor blk.0.ffn_up.weight is missing"),
    "no embedding": ({"without": "token_embd.weight"}, "tensor token_embd.weight is missing"),
    "another shape": (
        {"shape": ("blk.0.ffn_up.weight", (512, 128))},
        r"tensor blk.0.ffn_up.weight has shape \[512, 128\], its config asks for \[512, 256\]",
    ),
    "a matrix that is a row": ({"shape": ("token_embd.weight", (256,))}, "token_embd.weight is missing or no matrix"),
    "more tokens than rows": (
        {"shape": ("token_embd.weight", (300, 256))},
        "tokenizer.ggml.tokens: has 316 tokens, token_embd.weight 300 rows",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_their_key_or_tensor(fault: str, tmp_path: Path) -> None:
    given, told = FAULTS[fault]
    path = tmp_path / "m.gguf"
    changed(path, **{"change": lambda writer: None, **given})
    with pytest.raises(BadFile, match=told) as caught:
        gguf_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_sound_file_of_these_faults_is_taken(tmp_path: Path) -> None:
    changed(tmp_path / "m.gguf", lambda writer: None)
    assert gguf_file(tmp_path / "m.gguf").config.layers == 1
    assert SIZES["vocab_size"] == gguf_file(tmp_path / "m.gguf").config.vocab_size
