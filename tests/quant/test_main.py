"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import signal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from quant import __main__ as command
from quant import metrics
from quant.__main__ import main


@pytest.fixture
def model(stored, tmp_path, reference):
    """A stored checkpoint with a tokenizer that writes token i as the word ti."""
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to((stored / "awq-tiny" / name).resolve())
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(2048)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"t{i}" for i in reference["eval_ids"][:200].tolist()))
    return folder


def test_evaluate_in_markdown_and_json(model, stored, tmp_path, capsys, monkeypatch):
    asked = ["evaluate", str(model), "--text", str(tmp_path / "text.txt"), "--length", "40", "--windows", "3"]
    assert main(asked) == 0
    assert "3 windows, 117 predicted tokens" in capsys.readouterr().out
    assert main([*asked, "--against", str(stored / "bnb-int8-tiny"), "--json"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert out.out.count("\n") == 1
    assert found["comparison"]["kl"] > 0
    assert "model" in out.err  # the bars of progress
    monkeypatch.setattr(metrics, "KL_BAR", 0.0)
    assert main([*asked, "--against", str(stored / "bnb-int8-tiny")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{model} misses the bar: KL 0.0")


def test_quantize_refuses_in_one_line(model, tmp_path, capsys):
    assert main(["quantize", str(model), str(tmp_path / "out"), "--group", "32"]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.strip() == "m is quantized already: start from the original"


def test_quantize_ends_with_one_where_a_bar_is_missed(model, tmp_path, capsys, monkeypatch):
    given = ["quantize", str(model), str(tmp_path / "out")]
    for misses, code in (((), 0), (("KL 0.0500, bar 0.02",), 1)):
        monkeypatch.setitem(command._COMMANDS, "quantize", lambda *_, misses=misses: ("made\n", misses))
        assert main(given) == code
        out = capsys.readouterr()
        assert out.out == "made\n"
        assert ("misses the bar: KL 0.0500" in out.err) is bool(misses)
        assert (str(tmp_path / "out") in out.err) is bool(misses)


def test_quantize_says_what_it_made(stored, model, tmp_path, capsys):
    """From an 8-bit config over float weights: the simplest source there is, refused as quantized."""
    (model / "config.json").unlink()
    config = json.loads((stored / "awq-tiny" / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    assert main(["quantize", str(model), str(tmp_path / "out")]) == 1
    assert "qweight" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [[], ["serve"], ["quantize", "m"], ["quantize", "m", "o", "--format", "gptq"]])
def test_wrong_usage_is_status_two(asked, capsys):
    with pytest.raises(SystemExit) as caught:
        main(asked)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_ctrl_c_that_native_code_makes_another_error_of_is_still_ctrl_c(model, tmp_path, monkeypatch, capsys):
    """safetensors makes a ValueError of it where it arrives inside a read."""

    def read(given, bars):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(command._COMMANDS, "quantize", read)
    assert main(["quantize", str(model), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setitem(command._COMMANDS, "quantize", lambda given, bars: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["quantize", str(model), str(tmp_path / "out")])
