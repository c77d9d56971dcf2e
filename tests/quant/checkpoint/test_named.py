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
    assert f"has GGUF files and no config.json: give one of the files, such as {tmp_path / 'm.gguf'}" in misnamed(
        tmp_path
    )
    assert misnamed(tmp_path / "m.gguf") is None
    (tmp_path / "M.GGUF").touch()
    assert misnamed(tmp_path / "M.GGUF") is None
    (tmp_path / "M.GGUF").unlink()
    (tmp_path / "config.json").touch()
    assert misnamed(tmp_path) is None
    with pytest.raises(BadFile, match=r"has GGUF files and no safetensors; give one of the files, such as m\.gguf"):
        weight_files(tmp_path)
    (tmp_path / "model.pth").touch()
    with pytest.raises(BadFile, match=r"model\.pth: .*`whippet convert FOLDER OUT`"):
        weight_files(tmp_path)
