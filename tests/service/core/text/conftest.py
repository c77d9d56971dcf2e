"""Tokenizers of every kind that models ship, trained small and written as model folders."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    *inspect.getsource(argparse).splitlines(),
    "Grüße aus Łódź",
    "日本語のテキスト",
    "emoji 🙂🙃 e\u0301",
    "  two  spaces ",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPLIT = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """As Qwen, GPT-2 and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "漢字", "é" * 50])  # added, but not special
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: texts with ▁ for a space, and 256 byte tokens for what is not among them."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, limit_alphabet=70))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], *SPECIALS[3:]]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def metaspace() -> Tokenizer:
    """A unigram model: no table tells what its ids stand for."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIALS, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIALS)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def plain_words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


def opaque_bytes() -> Tokenizer:
    """Byte-level, with a decoder of which no table is made."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


BUILDERS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "opaque-bytes": opaque_bytes,
    "metaspace": metaspace,
    "word-piece": word_piece,
    "plain-words": plain_words,
}

Backend = Callable[[str], Tokenizer]
Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The library's own tokenizer of a kind, made once."""
    made: dict[str, str] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in made:
            made[kind] = BUILDERS[kind]().to_str()
        return Tokenizer.from_str(made[kind])

    return get


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Folder:
    """Writes a model folder: a kind, the settings to add to tokenizer_config.json, and other files."""

    def write(kind: str, config: dict[str, Any] | None = None, **files: Any) -> Path:
        path = tmp_path_factory.mktemp(kind)
        backend(kind).save(str(path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **(config or {})}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, content in files.items():
            stem, _, suffix = name.rpartition("_")
            text = content if isinstance(content, str) else json.dumps(content)
            (path / f"{stem}.{suffix}").write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML
