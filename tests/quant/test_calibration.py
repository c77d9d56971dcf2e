"""Windows cut from text or written by the model: spread, apart, repeatable."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quant.calibration import kept_bytes, own_windows, split, text_windows
from quant.checkpoint.errors import BadFile
from quant.decoder import Decoder
from quant.errors import CannotQuantize


@pytest.fixture
def model(tmp_path):
    """Each of the letters is a token; the tokenizer begins every text with id 9."""
    vocab = {letter: number for number, letter in enumerate("abcdefgh")} | {"?": 8, "<s>": 9}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 9)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, text, encoding="utf-8"):
    path = folder / "text.txt"
    path.write_bytes(text.encode(encoding))
    return path


def test_windows_follow_one_another_and_begin_as_texts_do(model):
    windows = text_windows(model, write(model, "abcdefgh" * 3), 5)
    assert windows.shape == (6, 5)
    assert windows[:, 0].tolist() == [9] * 6
    assert windows[:, 1:].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 3


def test_fewer_windows_are_spread_over_the_text(model):
    everything = text_windows(model, write(model, "abcdefgh" * 50), 5)
    some = text_windows(model, write(model, "abcdefgh" * 50), 5, 7)
    assert some.shape == (7, 5)
    assert torch.equal(some[0], everything[0])
    assert torch.equal(some[-1], everything[-1])
    assert len(text_windows(model, write(model, "abcdefgh" * 50), 5, 10**6)) == len(everything)


def test_long_texts_are_encoded_by_lines(model, monkeypatch):
    text = write(model, "abcd\nefgh\n" * 20)
    whole = text_windows(model, text, 5)
    monkeypatch.setattr("quant.calibration._ENCODE_AT_ONCE", 12)
    assert torch.equal(text_windows(model, text, 5), whole)


@pytest.mark.parametrize("text", ["", "abc"])
def test_too_little_text_is_refused(model, text):
    with pytest.raises(CannotQuantize, match=r"text\.txt has \d+ tokens"):
        text_windows(model, write(model, text), 5)


def test_no_windows_are_refused(model):
    with pytest.raises(CannotQuantize, match="one at least"):
        text_windows(model, write(model, "abcdefgh"), 5, 0)


def test_bytes_that_are_no_text_and_files_that_are_not_there(model):
    with pytest.raises(BadFile, match="UTF-8"):
        text_windows(model, write(model, "é" * 9, "latin-1"), 5)
    with pytest.raises(BadFile, match=r"gone\.txt"):
        text_windows(model, model / "gone.txt", 5)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        text_windows(model, write(model, "abcdefgh"), 5)


@pytest.mark.parametrize(("count", "held_out"), [(10, 1), (10, 9), (7, 3), (160, 32)])
def test_held_out_windows_are_apart_and_nothing_is_lost(count, held_out):
    windows = torch.arange(count).unsqueeze(1)
    parts = split(windows, held_out)
    assert len(parts.held_out) == held_out
    assert sorted([*parts.calibration.flatten().tolist(), *parts.held_out.flatten().tolist()]) == list(range(count))


@pytest.mark.parametrize(("count", "held_out"), [(3, 3), (3, 0), (0, 1)])
def test_a_split_that_leaves_nothing_is_refused(count, held_out):
    with pytest.raises(CannotQuantize):
        split(torch.arange(count).unsqueeze(1), held_out)


class Memory(dict):
    """Keeps what is written, as a job does."""

    def kept(self, name):
        return self.get(name)

    def keep(self, name, tensor):
        self[name] = tensor


@pytest.mark.product
@torch.inference_mode()
def test_what_a_model_has_written_is_not_written_again(stored, monkeypatch):
    decoder = Decoder.open(stored / "awq-tiny")
    config = json.loads((stored / "awq-tiny" / "config.json").read_text())
    monkeypatch.setattr("quant.calibration._TOGETHER", 2)
    whole, part = Memory(), Memory()
    windows = own_windows(decoder, config, 8, 5, 3, whole, lambda done, total: None)
    assert sorted(whole) == ["own-00000", "own-00002", "own-00004"]
    part.keep("own-00000", whole["own-00000"])
    heard: list[tuple[int, int]] = []
    assert torch.equal(own_windows(decoder, config, 8, 5, 3, part, lambda *one: heard.append(one)), windows)
    assert heard[:2] == [(2 * 7, 5 * 7), (2 * 7 + 2, 5 * 7)]
    assert len(heard) == 1 + 2 * 7


@pytest.mark.product
@torch.inference_mode()
def test_a_model_writes_its_own_text(stored, monkeypatch):
    decoder = Decoder.open(stored / "awq-tiny")
    config = json.loads((stored / "awq-tiny" / "config.json").read_text())
    heard: list[tuple[int, int]] = []

    def hear(done, total):
        heard.append((done, total))

    windows = own_windows(decoder, config, 24, 6, 1, Memory(), hear)
    assert windows.shape == (6, 24)
    assert windows[:, 0].tolist() == [1] * 6  # the begin token
    assert heard == [(6 * token, 6 * 23) for token in range(1, 24)]
    assert len({tuple(row) for row in windows.tolist()}) == 6
    assert torch.equal(own_windows(decoder, config, 24, 6, 1, Memory(), hear), windows)
    assert not torch.equal(own_windows(decoder, config, 24, 6, 2, Memory(), hear), windows)
    monkeypatch.setattr("quant.calibration._KEPT_BYTES", 4 * 24 * kept_bytes(decoder.config))
    heard.clear()
    assert own_windows(decoder, config, 24, 6, 1, Memory(), hear).shape == (6, 24)
    assert heard[22:24] == [(4 * 23, 6 * 23), (4 * 23 + 2, 6 * 23)]
    assert heard[-1] == (6 * 23, 6 * 23)
    # text at temperature 1 is about as likely as the model's own entropy says: far likelier than chance
    logits = decoder.logits(decoder.hidden(windows))
    losses = -logits[:, :-1].log_softmax(2).gather(2, windows[:, 1:].unsqueeze(2))
    assert float(losses.mean()) < 6 < torch.tensor(2048.0).log()


@pytest.mark.parametrize(
    ("config", "first"), [({"bos_token_id": None, "eos_token_id": [3, 4]}, 3), ({"eos_token_id": 2}, 2)]
)
def test_without_a_begin_token_the_end_token_begins(stored, config, first):
    decoder = Decoder.open(stored / "awq-tiny")
    assert int(own_windows(decoder, config, 2, 1, 0, Memory(), lambda done, total: None)[0, 0]) == first


def test_without_either_a_text_is_asked_for(stored):
    with pytest.raises(CannotQuantize, match="calibration text"):
        own_windows(Decoder.open(stored / "awq-tiny"), {}, 2, 1, 0, Memory(), lambda done, total: None)
