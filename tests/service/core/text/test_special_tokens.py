"""Special tokens in an answer's text, and tokens by themselves: for each kind of vocabulary as the library has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from service.core.text import Detokenizer, Tokenizer
from service.core.text.pieces import ByteLevelPieces, FallbackPieces, OpaquePieces, byte_letters

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
END = "<|end▁of|>"


def made(kind: str) -> tuple[Backend, Tokenizer]:
    if kind == "bytes":
        backend = Backend(models.BPE(vocab=byte_letters(), merges=[]))
        backend.decoder = decoders.ByteLevel()
    else:
        letters = ["▁", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
        backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps) if kind == "fallback" else decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken(END, normalized=False)])
    return backend, Tokenizer(backend, {}, "")


@pytest.mark.parametrize(
    ("kind", "pieces"), [("bytes", ByteLevelPieces), ("fallback", FallbackPieces), ("opaque", OpaquePieces)]
)
def test_text_with_special_tokens_is_the_librarys(kind: str, pieces: type) -> None:
    backend, tokenizer = made(kind)
    assert isinstance(tokenizer.pieces, pieces)
    start, end = (backend.token_to_id(text) for text in ("<s>", END))
    a, b = (backend.token_to_id(text) for text in ("a", "b"))
    ids = [start, a, end, b, a, start, b]
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, continues=True, skip_special=skip)
        text = "".join([*(detokenizer.push([one]).text for one in ids), detokenizer.flush().text])
        assert text == backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.token_texts.of(a) == ("a", b"")
    assert tokenizer.token_texts.of(start) == ("<s>", b"")
    assert tokenizer.token_texts.of(100_000) == ("", b"")


def test_a_stop_string_may_be_in_a_special_token() -> None:
    backend, tokenizer = made("bytes")
    a, end = backend.token_to_id("a"), backend.token_to_id(END)
    assert Detokenizer(tokenizer, ["<|end"]).push([a, end, a]).text == "aa"
    found = Detokenizer(tokenizer, ["<|end"], skip_special=False).push([a, end, a])
    assert (found.text, found.stop, found.ids) == ("a", "<|end", 2)


def test_half_a_character_has_its_bytes() -> None:
    for kind, spelled in (("bytes", {letter: byte for letter, byte in byte_letters().items()}), ("fallback", {})):
        backend, tokenizer = made(kind)
        letter = next((one for one, byte in spelled.items() if byte == 0xC3), "<0xC3>")
        assert tokenizer.token_texts.of(backend.token_to_id(letter)) == ("\ufffd", b"\xc3")


def test_a_real_vocabulary_spells_every_token() -> None:
    tokenizer = Tokenizer.load(DEMO)
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    for index in range(tokenizer.vocab_size):
        text, raw = tokenizer.token_texts.of(index)
        assert text == backend.decode([index], skip_special_tokens=False)
        assert not raw or raw.decode("utf-8", "replace") == text
