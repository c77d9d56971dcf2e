"""Vocabularies of GGUF files. The oracles: the tokenizer that the file was made of, transformers' own reading, and for
SentencePiece what llama.cpp does, written down here: the best pair of pieces is joined, of equals the leftmost."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from quant.checkpoint.errors import BadFile
from quant.checkpoint.fields import Fields
from quant.checkpoint.gguf import sentencepiece
from quant.checkpoint.gguf.vocabulary import GgufVocabulary, vocabulary_of
from tests.quant.gguf_files import SIZES, add_tokenizer, begun

TEXTS = [
    "Hello, world! It's 12345.67 o'clock; don't I'LL we've",
    "  two  blanks and\ttabs \n\n and lines\r\n x \n",
    "Grüße aus Łódź, e\u0301tude, 日本語のテキスト, 🙂🙃, Ünïcödé ١٢٣",
    "def f(x):\n    return {'a': x ** 2}  # comment\n",
    "<|im_start|>user\nhi<|im_end|><tool>x</tool>",
    "",
    " ",
    "CamelCaseWords HTTPServer/path/to//file\n/next",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": LLAMA3, "qwen2": LLAMA3.replace("{1,3}", ""), "tekken": TEKKEN}


def of_bytes(pre: str) -> Tokenizer:
    """As the models whose name this is have it in their tokenizer.json."""
    tokenizer = trained(whole_words=pre in ("llama-bpe", "tekken"))
    if pre in SPLITS:
        cut = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def trained(whole_words: bool) -> Tokenizer:
    """Knows long numbers and words across capitals, which other cuts take apart, and one word that no merge makes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    whole = json.loads(tokenizer.to_str())
    assert {"Ġ12345", "Ġcomment"} <= whole["model"]["vocab"].keys()
    whole["model"]["merges"] = [merge for merge in whole["model"]["merges"] if "".join(merge) != "Ġcomment"]
    whole["model"]["ignore_merges"] = whole_words
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<tool>", "</tool>"])
    return tokenizer


def fields_of(path: Path) -> Fields:
    from quant.checkpoint.gguf.header import read_header

    return Fields(read_header(path).metadata, str(path))


def finished(writer: GGUFWriter, path: Path) -> GgufVocabulary:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return vocabulary_of(fields_of(path), None)


def backend(vocabulary: GgufVocabulary) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(vocabulary.tokenizer))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_pairs_of_bytes_are_those_that_the_file_was_made_of(pre: str, tmp_path: Path) -> None:
    own, path = of_bytes(pre), tmp_path / "m.gguf"
    writer = begun(path, "llama", SIZES, tokenizer=False)
    add_tokenizer(writer, own, pre)
    found = backend(finished(writer, path))
    for text in TEXTS:
        ids = own.encode(text).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == own.decode(ids, skip_special_tokens=False)
        assert found.decode(ids) == own.decode(ids)
    assert found.get_vocab() == own.get_vocab()


@pytest.mark.parametrize(("family", "pre"), [("qwen2", "qwen2"), ("qwen3", "qwen2")])
def test_transformers_own_reading_of_pairs(family: str, pre: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = begun(path, family, SIZES, tokenizer=False)
    add_tokenizer(writer, of_bytes(pre), pre)
    found = backend(finished(writer, path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        if "<tool>" not in text:  # which transformers does not tell from other tokens
            assert found.encode(text).ids == theirs.encode(text)


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize(
    ("pre", "default"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_bos_by_the_file_and_by_its_kind(pre: str, default: bool, wanted: bool | None, tmp_path: Path) -> None:
    own, path = of_bytes(pre), tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, own, pre)
    writer.kv_data[0].pop("tokenizer.ggml.add_bos_token")
    if wanted is not None:
        writer.add_add_bos_token(wanted)
    if wanted:
        writer.add_add_eos_token(True)
    ids = backend(finished(writer, path)).encode("Hello").ids
    bos, eos = own.token_to_id("<|endoftext|>"), own.token_to_id("<|im_end|>")
    plain = own.encode("Hello").ids
    put = default if wanted is None else wanted
    assert ids == [bos] * put + plain + [eos] * bool(wanted)


_PIECES = "▁ e t a o i n s h r l d u the he in er an ▁t ▁a ▁the ▁an and ▁and ing ell hell hello ▁hello lo ll aa aaa"
PIECES = _PIECES.split()


def pieces() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as a SentencePiece model has them."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "[INST]", "<extra>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4]
    scores = [0.0] * 259 + [-float(number) for number in range(len(PIECES))] + [0.0, 0.0]
    # Longer pieces were found later, but for a few.
    return tokens, scores, kinds


def piece_file(path: Path, **flags: bool) -> GGUFWriter:
    tokens, scores, kinds = pieces()
    writer = begun(path, "llama", SIZES, tokenizer=False)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for flag, value in flags.items():
        getattr(writer, flag)(value)
    return writer


def as_llama_cpp(text: str, tokens: Mapping[str, int], scores: Mapping[str, float]) -> list[int]:
    """Of a text without special tokens, its blanks escaped."""
    parts = list(text)
    while True:
        joined = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [tokens[part]] if part in tokens else [tokens[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_joined_as_llama_cpp_joins_them(prefix: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    vocabulary = finished(piece_file(path, add_add_space_prefix=prefix), path)
    found = backend(vocabulary)
    tokens, scores, kinds = pieces()
    ids = {token: number for number, token in enumerate(tokens)}
    plain = {token: scores[number] for number, token in enumerate(tokens) if kinds[number] == 1}
    for text in ("hello", "the hand  and the hello", "anderthe", "x ü 日 🙂", "tellhellothe", " ", "aaa aaaa"):
        escaped = ("▁" if prefix else "") + text.replace(" ", "▁")
        assert found.encode(text).ids == [1, *as_llama_cpp(escaped, ids, plain)]
        assert found.decode(found.encode(text).ids) == text
    assert found.encode("").ids == [1]
    special = found.encode("a[INST]b<extra>").ids
    assert [ids["[INST]"], ids["<extra>"]] == [one for one in special if one in (ids["[INST]"], ids["<extra>"])]
    assert [one["special"] for one in vocabulary.tokenizer["added_tokens"]] == [True, True, True, False]


def test_transformers_own_reading_of_pieces(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    found = backend(finished(piece_file(path), path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("hello", "the hand  and the hello", "x ü 日 🙂", "anderthe"):
        assert found.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def test_templates_roles_and_ends(tmp_path: Path) -> None:
    own, path = of_bytes("llama-bpe"), tmp_path / "m.gguf"
    own.add_special_tokens(["<|eot_id|>", "<|eom_id|>"])
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, own, "llama-bpe")
    writer.add_string("tokenizer.chat_template.tool_use", "tools")
    writer.add_uint32("tokenizer.ggml.eot_token_id", own.token_to_id("<|eot_id|>"))
    writer.add_pad_token_id(own.token_to_id("<|endoftext|>"))
    found = finished(writer, path)
    names = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|eom_id|>")
    assert set(found.ends) == {own.token_to_id(name) for name in names}
    assert found.ends[:2] == (own.token_to_id("<|im_end|>"), own.token_to_id("<|eot_id|>"))
    assert found.settings["bos_token"] == found.settings["pad_token"] == "<|endoftext|>"
    assert found.settings["eos_token"] == "<|im_end|>"
    assert found.templates["additional_chat_templates/tool_use.jinja"] == "tools"
    assert found.templates["chat_template.jinja"].startswith("{% for m in messages %}")


def test_what_only_fills_up_is_no_token(tmp_path: Path) -> None:
    raw = plain_metadata()
    raw["tokenizer.ggml.tokens"] += [f"[PAD{number}]" for number in (6, 7)]
    raw["tokenizer.ggml.token_type"] = array("i", [3, 1, 1, 1, 1, 1, 5, 5])
    found = vocabulary_of(Fields(raw, "m.gguf"), None)
    assert "[PAD6]" not in found.tokenizer["model"]["vocab"]
    assert found.size == 8


def plain_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "c", "ab", "abc"],
        "tokenizer.ggml.token_type": array("i", [3, 1, 1, 1, 1, 1]),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 0,
    }


PLAIN = "tokenizer.ggml."
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens: must be an array of texts"),
    "tokens that are numbers": ({"tokens": array("i", [1])}, "tokenizer.ggml.tokens: must be an array of texts"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges: must be an array of texts"),
    "types for others": ({"token_type": array("i", [1])}, "tokenizer.ggml.token_type: has 1 numbers for 6 tokens"),
    "types that are texts": ({"token_type": ["a"] * 6}, "tokenizer.ggml.token_type: must be an array of numbers"),
    "a token twice": ({"tokens": ["<s>", "a", "b", "c", "ab", "a"]}, "'a' is both token 1 and token 5"),
    "a merge of strangers": ({"merges": ["a b", "a c"]}, r"tokenizer.ggml.merges: 'a c' \(number 1\) does not join"),
    "a merge of one": ({"merges": ["ab"]}, r"tokenizer.ggml.merges: 'ab' \(number 0\) does not join"),
    "another kind": ({"model": "bert"}, "tokenizer.ggml.model: 'bert' is not served"),
    "no kind": ({"model": None}, "tokenizer.ggml.model: None is not served"),
    "another cut": ({"pre": "chameleon"}, "tokenizer.ggml.pre: 'chameleon' is not served"),
    "no cut": ({"pre": None}, "tokenizer.ggml.pre: is missing"),
    "an id beyond": ({"bos_token_id": 6}, "tokenizer.ggml.bos_token_id: must be a whole number from 0 to 5"),
    "an id that is a text": ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id: must be a whole number"),
    "a flag that is a number": ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: must be true or false"),
    "pieces without scores": ({"model": "llama"}, "tokenizer.ggml.scores: must be an array of numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_their_key(fault: str) -> None:
    changes, told = FAULTS[fault]
    raw = plain_metadata()
    for name, value in changes.items():
        raw[PLAIN + name] = value
    raw = {key: value for key, value in raw.items() if value is not None}
    with pytest.raises(BadFile, match=told):
        vocabulary_of(Fields(raw, "m.gguf"), None)


def test_a_template_is_a_text() -> None:
    raw = {**plain_metadata(), "tokenizer.chat_template": 5}
    with pytest.raises(BadFile, match=r"tokenizer\.chat_template: must be a text"):
        vocabulary_of(Fields(raw, "m.gguf"), None)


@pytest.mark.parametrize(("bound", "most"), [("MAX_WORK", 100), ("MAX_MERGES", 5)])
def test_merges_of_pieces_are_bounded(bound: str, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sentencepiece, bound, most)
    path = tmp_path / "m.gguf"
    with pytest.raises(BadFile, match=r"tokenizer\.ggml\.tokens: has pieces longer than those of any model"):
        finished(piece_file(path), path)
