"""Joined files hold the tensors of their parts, in as many files as the limit asks for."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quant.checkpoint.errors import BadFile
from quant.checkpoint.safetensors import Checkpoint
from quant.shards import join, write_part
from tests.properties import example_count

TYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]


@settings(max_examples=example_count(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=2)), max_size=4),
        min_size=1,
        max_size=4,
    ),
    limit=st.sampled_from([1, 200, 400, 1 << 20]),
)
def test_nothing_is_lost(tmp_path_factory, parts, limit):
    folder = tmp_path_factory.mktemp("joined")
    paths, tensors = [], {}
    for number, part in enumerate(parts):
        own = {f"{number}.{i}": torch.randint(0, 99, shape).to(dtype) for i, (dtype, shape) in enumerate(part)}
        tensors |= own
        paths.append(folder / f"part-{number}")
        write_part(paths[-1], own)
    join(paths, folder, limit)
    files = sorted(folder.glob("model*.safetensors"))
    found = {}
    for file in files:
        found |= load_file(file)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == tensors.keys()
        assert all((folder / file).is_file() for file in index.values())
    assert not list(folder.glob("*.writing"))


def test_the_limit_cuts_files(tmp_path):
    paths = []
    for number in range(5):
        paths.append(tmp_path / f"p{number}")
        write_part(paths[-1], {f"t{number}": torch.zeros(1000)})
    join(paths, tmp_path, 9000)
    names = [file.name for file in sorted(tmp_path.glob("model-*"))]
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (tmp_path / "config.json").write_text("{}")
    assert set(Checkpoint(tmp_path).names()) == {f"t{i}" for i in range(5)}


def test_every_tensor_lies_on_its_own_alignment(tmp_path):
    write_part(tmp_path / "a", {"odd": torch.zeros(3, dtype=torch.uint8), "wide": torch.zeros(2)})
    write_part(tmp_path / "b", {"wide2": torch.zeros(2), "half": torch.zeros(1).half()})
    join([tmp_path / "a", tmp_path / "b"], tmp_path, 1 << 20)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, size in (("wide", 4), ("wide2", 4), ("half", 2)):
        assert header[name]["data_offsets"][0] % size == 0


def test_a_part_cut_short_is_noticed(tmp_path):
    path = tmp_path / "a"
    write_part(path, {"t": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadFile, match="cut short"):
        join([path], tmp_path, 1 << 20)
    assert not (tmp_path / "model.safetensors").exists()
