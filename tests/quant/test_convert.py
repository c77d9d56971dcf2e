"""Pickled weights become safetensors. Oracles: torch and transformers, which wrote them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from quant import convert as converting
from quant.checkpoint.errors import BadFile
from quant.checkpoint.header import DTYPES
from quant.checkpoint.safetensors import Checkpoint
from quant.convert import convert
from quant.errors import CannotQuantize
from quant.torch_file import TorchFile
from quant.torch_program import ProgramRefused, read_program

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def quiet(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def made(folder: Path, tied: bool) -> AutoModelForCausalLM:
    """A model in `folder` as transformers wrote it before safetensors."""
    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"])
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    folder.mkdir()
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "LICENSE"):
        (folder / name).write_text(f"{name}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools\n")
    (folder / "modeling_own.py").write_text("raise SystemExit\n")
    return model


def sharded(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Three files and their index."""
    names = list(state)
    weight_map = {}
    for number in range(3):
        file = f"pytorch_model-{number + 1:05}-of-00003.bin"
        part = {name: state[name] for name in names[number::3]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_both_folders_are_the_same_model(tmp_path, monkeypatch, tied, shards):
    model = made(tmp_path / "m", tied)
    state = model.state_dict()
    assert "lm_head.weight" in state
    if shards:
        sharded(tmp_path / "m", state)
        monkeypatch.setattr(converting, "_SHARD_BYTES", 8192)
    else:
        torch.save(state, tmp_path / "m" / "pytorch_model.bin")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "m").iterdir()}
    convert(tmp_path / "m", tmp_path / "out", quiet)
    out = tmp_path / "out"
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 2) == shards
    assert all(file.stat().st_size < 8192 + 4096 for file in files if shards)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    copied = {path.name for path in out.iterdir()} - {file.name for file in files} - {"model.safetensors.index.json"}
    assert copied == {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "LICENSE",
                      "additional_chat_templates"}  # fmt: skip
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools\n"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "m").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


@pytest.mark.proof
def test_the_command(tmp_path):
    model = made(tmp_path / "m", False)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "m" / "last.ckpt")
    torch.save({}, tmp_path / "m" / "optimizer.pt")
    asked = [sys.executable, "-m", "quant", "convert", str(tmp_path / "m"), str(tmp_path / "out")]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("25 tensors, 0 MiB, 1 files in ")
    assert len(Checkpoint(tmp_path / "out").names()) == 25
    again = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stderr) == (1, f"{tmp_path / 'out'} is there already: name a new folder\n")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_are_those_that_torch_reads(tmp_path, dtype):
    whole = (torch.arange(24).view(2, 3, 4) - 7).to(dtype)
    saved = {
        "whole": whole,
        "piece": whole[1, :, 1:3],
        "turned": whole.transpose(0, 2),
        "one": whole[0, 0, 0],
        "none": whole[:0],
        "parameter": torch.nn.Parameter(whole, requires_grad=False),
    }
    for protocol in (2, 4):
        torch.save(saved, tmp_path / "x.pt", pickle_protocol=protocol)
        file = TorchFile(tmp_path / "x.pt")
        assert file.views.keys() == saved.keys()
        for name, tensor in saved.items():
            found = file.tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
            assert file.nbytes(name) == tensor.numel() * tensor.element_size()


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_pickle_with_code_is_refused_by_what_it_wants_and_not_run(tmp_path):
    evil = Evil(tmp_path / "made")
    state = made(tmp_path / "m", False).state_dict()
    weights = tmp_path / "m" / "pytorch_model.bin"

    def refuse() -> None:
        with pytest.raises(BadFile, match=r"pytorch_model\.bin: it wants to import 'posix\.mkdir'") as caught:
            convert(tmp_path / "m", tmp_path / "out", quiet)
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["m"]

    for protocol in (0, 2, 4):  # by pickle itself, and by torch, hidden among tensors
        weights.write_bytes(pickle.dumps(evil, protocol))
        refuse()
        torch.save({**state, "model.norm.weight": evil}, weights, pickle_protocol=max(2, protocol))
        refuse()
    weights.write_bytes(pickle.dumps(evil))
    pickle.loads(weights.read_bytes())  # it would
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "'os.system'"),
        (b"(S'true'\nios\nsystem\n.", "S"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "'os.system'"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "it calls torch.FloatStorage"),
        (b"\x80\x02}", "damaged"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02)Q.", "damaged"),
        (b"\x80\x02]}s.", "damaged"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\xff", "damaged"),
        (b"", "damaged"),
    ],
)
def test_programs_that_describe_no_tensors(program, told):
    with pytest.raises(ProgramRefused) as caught:
        read_program(program)
    assert told in str(caught.value)


def test_any_bytes_are_data_or_refused():
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(3))}, buffer)
    program = zipfile.ZipFile(buffer).read("archive/data.pkl")
    for at in range(len(program)):
        for flip in (1, 16, 255):
            changed = bytearray(program)
            changed[at] ^= flip
            with contextlib.suppress(ProgramRefused):
                read_program(bytes(changed))


def rewritten(path: Path, change: dict[str, bytes | None]) -> None:
    """An archive with other members: None takes one out."""
    with zipfile.ZipFile(path) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()} | change
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)


DAMAGED = {
    "no numbers": ({"x/data/0": None}, "the numbers of 'a' are not all there"),
    "too few": ({"x/data/0": b"\0" * 15}, "the numbers of 'a' are not all there"),
    "no description": ({"x/data.pkl": None}, "no description of tensors"),
    "no tensors": ({"x/data.pkl": b"\x80\x02}."}, "holds no tensors by name"),
    "a program": ({"x/code/m.py": b""}, "TorchScript"),
    "byte order": ({"x/byteorder": b"big"}, "another byte order"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_archives(tmp_path, case):
    torch.save({"a": torch.ones(4)}, tmp_path / "x.pt")
    change, told = DAMAGED[case]
    rewritten(tmp_path / "x.pt", change)
    with pytest.raises(BadFile, match=told):
        TorchFile(tmp_path / "x.pt")


def test_other_files(tmp_path):
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(BadFile, match=r"is not what torch has written since 1\.6"):
        TorchFile(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadFile, match="pointer of Git LFS"):
        TorchFile(path)
    path.write_bytes(b"")
    with pytest.raises(BadFile):
        TorchFile(path)
    path.write_bytes(b"PK\x05\x06" + b"\0" * 18)
    with pytest.raises(BadFile, match="no description"):
        TorchFile(path)


def test_a_tensor_that_is_wider_than_its_numbers_takes_no_memory(tmp_path):
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "x.pt")
    with pytest.raises(BadFile, match="the numbers of 'a' are not all there"):
        TorchFile(tmp_path / "x.pt")


def test_what_is_refused_leaves_nothing(tmp_path):
    model = made(tmp_path / "m", False)
    with pytest.raises(BadFile, match="no pickled weights"):
        convert(tmp_path / "m", tmp_path / "out", quiet)
    state = model.state_dict()
    del state["model.norm.weight"]
    torch.save(state, tmp_path / "m" / "a.pth")
    with pytest.raises(BadFile, match=r"tensor model\.norm\.weight is missing"):
        convert(tmp_path / "m", tmp_path / "out", quiet)
    torch.save(state, tmp_path / "m" / "b.pth")
    with pytest.raises(CannotQuantize, match=r"has a\.pth and b\.pth: leave the one"):
        convert(tmp_path / "m", tmp_path / "out", quiet)
    (tmp_path / "m" / "model.safetensors").touch()
    with pytest.raises(CannotQuantize, match="has safetensors already"):
        convert(tmp_path / "m", tmp_path / "out", quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_run_that_was_killed_is_begun_again(tmp_path):
    torch.save(made(tmp_path / "m", False).state_dict(), tmp_path / "m" / "pytorch_model.bin")
    (tmp_path / ".out.converting").mkdir()
    (tmp_path / ".out.converting" / "left").touch()
    (tmp_path / "out").mkdir()
    convert(tmp_path / "m", tmp_path / "out", quiet)
    assert not (tmp_path / "out" / "left").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
