"""Model folders that mean harm: served with numbers, or refused in one line that names the folder, soon and in little
memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import InvalidModel, Unsupported
from engine.settings import EngineSettings
from engine.worker.build import build
from tests.engine.loading.test_load import CONFIG, WEIGHTS, tensors, write
from tests.properties import example_count

INDEX = "model.safetensors.index.json"
HUGE = 1 << 31
HOSTILE = (
    st.sampled_from([-1, 0, 1, 2, 3, 7, 1 << 16, HUGE, 1 << 62, 10**400])
    | st.sampled_from([-0.5, 0.0, 1e-45, 0.5, 1.5, 1e30, 1e308, math.nan, math.inf, -math.inf])
    | st.sampled_from([None, True, "", "zzz", "../x", "yarn", [], [[]], {}, {"rope_type": "zzz"}])
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "zzz"])},
    optional={
        key: HOSTILE
        for key in (
            *("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        )
    },
)
FIELDS = sorted({*CONFIG, "eos_token_id", "rope_scaling", "attention_bias", "sliding_window", "quantization_config"})


def attempt(folder: Path, **given: Any) -> str:
    """What was refused, or nothing."""
    asked = EngineSettings(
        model=str(folder), device="cpu", threads=1, max_sequences=1, max_batch_tokens=16, kv_bytes=1 << 20, **given
    )
    said = ""
    try:
        build(asked, lambda *told: None).close()
    except (InvalidModel, Unsupported) as error:
        said = str(error)
    assert len(said) < 1000
    assert "\n" not in said
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("folders") / "whole")


@pytest.mark.product
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), HOSTILE, max_size=2),
    rope=st.none() | ROPE,
    load_format=st.sampled_from(["auto", "dummy"]),
)
@settings(max_examples=example_count(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_config_of_anything_is_served_or_refused_in_one_line(
    whole: Path, fields: dict[str, Any], rope: dict[str, Any] | None, load_format: str
) -> None:
    config = {**CONFIG, **fields, **({} if rope is None else {"rope_scaling": rope})}
    (whole / "config.json").write_text(json.dumps(config))
    attempt(whole, load_format=load_format)  # a step with finite logits is part of it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rms_norm_eps", value) for value in (-1, 0, math.nan, math.inf, 2)),
        *(("rope_theta", value) for value in (0, -1, 1, math.nan, 1e300)),
        ("rope_scaling", {"rope_type": "zzz"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2, "beta_fast": -1}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 1e308}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": -8}),
        ("eos_token_id", 64),
        ("eos_token_id", [1, 10**12]),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 3),
        ("vocab_size", 63),
        ("vocab_size", 65),
        ("vocab_size", HUGE),
    ],
)
def test_each_of_these_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    assert str(tmp_path) in attempt(tmp_path)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size"])
def test_more_than_any_memory_is_refused_before_it_is_asked_for(tmp_path: Path, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, field: HUGE, "num_hidden_layers": 1024}))
    assert "bytes" in attempt(tmp_path, load_format="dummy")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name",
    [
        *("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"),
        *("model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.down_proj.weight"),
        *("model.layers.0.self_attn.k_proj.weight", "lm_head.weight"),
    ],
)
def test_a_weight_that_is_no_number_is_found_before_anybody_is_served(tmp_path: Path, name: str, value: float) -> None:
    config = {**CONFIG, "tie_word_embeddings": False}
    held = tensors(config)
    held[name].view(-1)[-1] = value
    write(tmp_path, config, held)
    assert "NaN or infinity" in attempt(tmp_path)


def odd(file: Path, kind: str) -> None:
    """Something of this kind in the place of a file."""
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(file.parent)  # the name of a socket is short
            try:
                made.bind(file.name)
            finally:
                os.chdir(here)
    else:
        file.symlink_to({"device": "/dev/zero", "cycle": file.name, "nowhere": "gone", "terminal": "/dev/tty"}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "terminal", "cycle", "nowhere"])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, INDEX, "quant_config.json"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path)
    odd(tmp_path / name, kind)
    assert str(tmp_path / name) in attempt(tmp_path)


def test_a_shard_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "a.safetensors")
    names = load_file(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    assert attempt(tmp_path) == ""
    odd(tmp_path / "a.safetensors", "pipe")
    assert "a.safetensors: is no regular file" in attempt(tmp_path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[" * 100_000, "corrupt"),
        (json.dumps({"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 4]}}).encode(), "corrupt"),
        (json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]}}).encode(), "corrupt"),
    ],
)
def test_a_header_that_lies_about_sizes(tmp_path: Path, header: bytes, said: str) -> None:
    write(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert said in attempt(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 62) + bytes(100))
    assert "truncated or not safetensors" in attempt(tmp_path)


def test_files_of_great_length_are_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("config.json", INDEX):
        shutil.copy(tmp_path / "config.json", tmp_path / "kept")
        with (tmp_path / name).open("w") as file:
            file.truncate(1 << 40)  # holes alone
        assert f"{name}: larger than" in attempt(tmp_path)
        (tmp_path / "kept").replace(tmp_path / "config.json")


@pytest.mark.product
def test_a_hostile_folder_ends_the_server_with_one_line_at_once(tmp_path: Path) -> None:
    """Exit code 3, and one engine process."""
    demo = Path(__file__).resolve().parents[3] / "models" / "demo"
    folder = tmp_path / "model"
    shutil.copytree(demo, folder)
    held = load_file(folder / WEIGHTS)
    held["model.norm.weight"][0] = math.nan
    save_file(held, folder / WEIGHTS)
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "health-listen")]
    asked = ("--model", str(folder), *ports, *("--metrics-listen", ""), *("--device", "cpu"))
    command = [sys.executable, "-m", "service.cli", "serve", *asked, "--cache.semantic.mode", "off"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=demo.parents[1])
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "model.norm.weight" in line]
    assert "NaN or infinity" in line
