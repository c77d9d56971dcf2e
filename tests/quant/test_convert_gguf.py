"""A GGUF file becomes a folder. Oracles: transformers, which reads the folder, and the file itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quant import convert as converting
from quant.__main__ import main
from quant.checkpoint.digest import of_texts
from quant.checkpoint.errors import BadFile
from quant.checkpoint.formats import read_spec
from quant.checkpoint.reading import load_config
from quant.convert import convert
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from tests.quant.gguf_files import FAMILIES, small_tokenizer, write_model

TEXT = "the quick brown fox jumps over the lazy dog, 123 times"


def quiet(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_the_model(family: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    held = write_model(path, family, {"v_proj": "F16", "norm": "F32", "": "Q4_1"})
    said = convert(path, out, quiet)
    assert f"{len(held)} tensors" in said
    assert "in Q4_1 as bfloat16" in said
    written = load_file(out / "model.safetensors")
    assert set(written) == set(held)
    for name, tensor in held.items():
        plain = tensor.dim() == 1 or "v_proj" in name
        expected = tensor if plain else tensor.bfloat16().float()
        rounding = 1e-6 if family == "gemma3" and tensor.dim() == 1 else 0.0  # the file holds one more
        assert torch.allclose(written[name].float(), expected, rtol=0, atol=rounding), name
    assert load_config(out) == load_config(path)
    assert of_texts(out) == of_texts(path)
    assert read_spec(out) is None


@pytest.mark.parametrize("family", ["llama3-rope", "qwen3", "gemma3"])
def test_transformers_reads_the_folder(family: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    write_model(path, family, "F32")
    convert(path, out, quiet)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = small_tokenizer().encode(TEXT).ids
    assert tokenizer.encode(TEXT) == ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user: hi\nassistant: "
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits
    decoder = Decoder.open(path)
    found = decoder.logits(decoder.hidden(torch.tensor([ids])))
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())


def test_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    held = write_model(path, "qwen2", "Q8_0")
    monkeypatch.setattr(converting, "_SHARD_BYTES", 1 << 20)
    convert(path, out, quiet)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(held)


def test_a_bad_file_makes_no_folder(tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(BadFile, match=r"m\.gguf: has version 0"):
        convert(path, out, quiet)
    assert list(tmp_path.iterdir()) == [path]
    write_model(path, "llama")
    out.mkdir()
    (out / "own").touch()
    with pytest.raises(CannotQuantize, match="is there already"):
        convert(path, out, quiet)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, text = tmp_path / "m.gguf", tmp_path / "out", tmp_path / "text"
    write_model(path, "llama", "Q4_1")
    text.write_text(f"{TEXT} " * 40)
    assert main(["convert", str(path), str(out)]) == 0
    assert "as bfloat16" in capsys.readouterr().out
    assert main(["evaluate", str(path), "--against", str(out), "--text", str(text), "--length", "32"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["quantize", str(path), str(tmp_path / "other")]) == 1
    assert "`whippet convert` makes a folder of plain numbers" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none.gguf"), str(tmp_path / "other")]) == 1
    assert "none.gguf is not there: give a folder with config.json" in capsys.readouterr().err
