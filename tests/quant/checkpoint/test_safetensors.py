"""Model folders: shards, indexes, and files that are missing, cut short, damaged or not what they say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quant.checkpoint.errors import BadFile, CheckpointError
from quant.checkpoint.formats import read_spec
from quant.checkpoint.header import read_header
from quant.checkpoint.reading import load_config, read_config
from quant.checkpoint.safetensors import Checkpoint
from tests.properties import example_count

WEIGHTS = "model.safetensors"


def test_tensors_come_as_they_were_saved(tmp_path: Path) -> None:
    held = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.arange(7, dtype=torch.int32),
        "c": torch.tensor(2.5, dtype=torch.float16),
        "d": torch.empty(0, 4),
        "e": torch.randn(70, 1000),
    }
    save_file(held, tmp_path / WEIGHTS)
    source = Checkpoint(tmp_path)
    assert set(source.names()) == held.keys()
    for _ in range(2):  # pages given back are read again
        for name, tensor in held.items():
            assert source.shape(name) == tuple(tensor.shape)
            assert source.dtype(name) == tensor.dtype
            assert torch.equal(source.tensor(name), tensor)
    source.close()


def test_the_file_is_never_written(tmp_path: Path) -> None:
    save_file({"a": torch.ones(64)}, tmp_path / WEIGHTS)
    before = (tmp_path / WEIGHTS).read_bytes()
    source = Checkpoint(tmp_path)
    source.tensor("a").zero_()
    source.close()
    assert (tmp_path / WEIGHTS).read_bytes() == before


@given(data=st.data())
@settings(max_examples=example_count(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_to_a_header_does_more_than_refuse(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / WEIGHTS
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(5)}, file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw))
    try:
        found = read_header(file)
    except BadFile as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError("more than one line") from error
        return
    assert all(one.start + one.size <= file.stat().st_size for one in found.values())
    source = Checkpoint(tmp_path)
    for name in source.names():
        assert tuple(source.tensor(name).shape) == source.shape(name)
    source.close()


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(
        {"a.weight": torch.ones(4, 2), "b.weight": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors"
    )
    return tmp_path


def test_headers_and_tensors(model):
    folder = Checkpoint(model)
    assert set(folder.names()) == {"a.weight", "b.weight"}
    assert folder.shape("a.weight") == (4, 2)
    assert folder.dtype("b.weight") == torch.int8
    assert torch.equal(folder.tensor("a.weight"), torch.ones(4, 2))
    assert read_spec(model, folder.names()) is None
    assert folder.nbytes() == (model / "model.safetensors").stat().st_size


def test_shards_by_index(model):
    save_file({"c.weight": torch.ones(1)}, model / "n.safetensors")
    (model / "stray.safetensors").write_bytes(b"not listed, not read")
    index = {"weight_map": {"a.weight": "model.safetensors", "c.weight": "n.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(model).shape("c.weight") == (1,)


@pytest.mark.parametrize("file", ["../m.safetensors", "/etc/passwd", "sub/m.safetensors", "m.bin", "gone.safetensors"])
def test_an_index_stays_inside_the_folder(model, file):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(BadFile):
        Checkpoint(model)


def test_older_config_file(model):
    (model / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 64, "version": "GEMM"}')
    spec = read_spec(model, Checkpoint(model).names())
    assert spec is not None
    assert spec.name == "awq-gemm"


def test_packed_tensors_without_a_config(model):
    save_file({"a.qweight": torch.ones(1)}, model / "model-q.safetensors")
    with pytest.raises(BadFile, match="quantization_config"):
        read_spec(model, Checkpoint(model).names())


def test_other_weight_files_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadFile, match="pickled weights are never loaded"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff", '{"a": 1'])
def test_json_that_is_not_an_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(BadFile, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadFile, match=r"config\.json"):
        load_config(tmp_path)
    with pytest.raises(BadFile, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 8, 60, -1])
def test_a_file_cut_short_is_refused(model, cut):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadFile, match=r"model\.safetensors"):
        Checkpoint(model)


def test_a_header_that_claims_much_allocates_nothing(model):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(BadFile):
        Checkpoint(model)
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(BadFile):
        Checkpoint(model)


@settings(max_examples=example_count(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_one_wrong_byte_anywhere(model, at, byte):
    path = model / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    said = "model.safetensors"
    try:
        folder = Checkpoint(model)
        for name in folder.names():
            folder.dtype(name)
            folder.tensor(name)
    except CheckpointError as error:
        said = str(error)
    finally:
        path.write_bytes(whole)
    assert "model.safetensors" in said
