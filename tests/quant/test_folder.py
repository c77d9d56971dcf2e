"""Model folders: shards, indexes, and files that are missing, cut short or not what they say."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quant.errors import BadConfig, BadFile, QuantError
from quant.folder import Folder, read_json


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a.weight": torch.ones(4, 2), "b.weight": torch.zeros(3, dtype=torch.int8)}, tmp_path / "m.safetensors")
    return tmp_path


def test_headers_and_tensors(model):
    folder = Folder(model)
    assert set(folder.names()) == {"a.weight", "b.weight"}
    assert folder.shape("a.weight") == (4, 2)
    assert folder.dtype("b.weight") == torch.int8
    assert torch.equal(folder.tensor("a.weight"), torch.ones(4, 2))
    assert folder.spec() is None
    assert folder.nbytes() == (model / "m.safetensors").stat().st_size


def test_shards_by_index(model):
    save_file({"c.weight": torch.ones(1)}, model / "n.safetensors")
    (model / "stray.safetensors").write_bytes(b"not listed, not read")
    index = {"weight_map": {"a.weight": "m.safetensors", "c.weight": "n.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Folder(model).shape("c.weight") == (1,)


@pytest.mark.parametrize("file", ["../m.safetensors", "/etc/passwd", "sub/m.safetensors", "m.bin", "gone.safetensors"])
def test_an_index_stays_inside_the_folder(model, file):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(BadFile):
        Folder(model)


def test_older_config_file(model):
    (model / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 64, "version": "GEMM"}')
    spec = Folder(model).spec()
    assert spec is not None
    assert spec.name == "awq-gemm"


def test_packed_tensors_without_a_config(model):
    save_file({"a.qweight": torch.ones(1)}, model / "q.safetensors")
    with pytest.raises(BadConfig):
        Folder(model).spec()


def test_other_weight_files_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadFile, match=r"no \*\.safetensors"):
        Folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff", '{"a": 1'])
def test_json_that_is_not_an_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(BadFile, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadFile, match=r"config\.json"):
        Folder(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 8, 60, -1])
def test_a_file_cut_short_is_refused(model, cut):
    path = model / "m.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadFile, match=r"m\.safetensors"):
        Folder(model)


def test_a_header_that_claims_much_allocates_nothing(model):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (model / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(BadFile):
        Folder(model)
    (model / "m.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(BadFile):
        Folder(model)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_one_wrong_byte_anywhere(model, at, byte):
    path = model / "m.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    said = "m.safetensors"
    try:
        folder = Folder(model)
        for name in folder.names():
            folder.dtype(name)
            folder.tensor(name)
    except QuantError as error:
        said = str(error)
    finally:
        path.write_bytes(whole)
    assert "m.safetensors" in said
