"""What is no model's folder is told apart by its name."""

from __future__ import annotations

import pytest

from quant.checkpoint.errors import BadFile
from quant.checkpoint.named import misnamed
from quant.checkpoint.safetensors import weight_files


def test_a_name_of_a_hub_says_how_to_fetch_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = misnamed("Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in said
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert misnamed("Qwen/Qwen3-0.6B") is None


@pytest.mark.parametrize(
    "path", ["/no/where", "./no/where", "../no", "no", "no/", "a/b/c", "~/m", ".hidden/m", "-a/b c"]
)
def test_a_path_that_is_not_there_is_no_such_name(path):
    assert misnamed(path) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("m.gguf", "llama.cpp"),
        ("M.GGUF", "llama.cpp"),
        ("pytorch_model.bin", "whippet convert"),
        ("x.ckpt", "whippet convert"),
        ("model.safetensors", "give its folder"),
        ("notes.txt", "config.json"),
    ],
)
def test_files(tmp_path, name, told):
    (tmp_path / name).touch()
    said = misnamed(tmp_path / name)
    assert said.startswith(str(tmp_path / name))
    assert told in said
    assert "\n" not in said


def test_folders(tmp_path):
    assert misnamed(tmp_path) is None
    (tmp_path / "m.gguf").touch()
    assert "m.gguf is in llama.cpp's format" in misnamed(tmp_path)
    (tmp_path / "config.json").touch()
    assert misnamed(tmp_path) is None
    with pytest.raises(BadFile, match=r"m\.gguf: cannot be served; it is in llama\.cpp's format"):
        weight_files(tmp_path)
    (tmp_path / "model.pth").touch()
    with pytest.raises(BadFile, match=r"model\.pth: .*`whippet convert FOLDER OUT`"):
        weight_files(tmp_path)
