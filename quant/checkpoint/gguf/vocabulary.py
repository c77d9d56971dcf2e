"""Converts a GGUF file's vocabulary to tokenizer.json, tokenizer_config.json and chat templates. Needs no torch.

Special tokens are in the BPE model's vocabulary too, so that the id of each token is its index in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quant.checkpoint.errors import MEND, short
from quant.checkpoint.fields import Fields
from quant.checkpoint.gguf.sentencepiece import VocabularyTooLarge, merges_of

TOKENS: Final = "tokenizer.ggml.tokens"
TYPES: Final = "tokenizer.ggml.token_type"
SCORES: Final = "tokenizer.ggml.scores"
MERGES: Final = "tokenizer.ggml.merges"
MODEL: Final = "tokenizer.ggml.model"
PRE: Final = "tokenizer.ggml.pre"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ROLES: Final = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "mask": "mask"}
_ENDS: Final = ("eos", "eot", "eom")
# Special tokens that end an answer in every model that has them. A file may declare only one of them.
_ENDING: Final = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>"})

_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN: Final = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3: Final = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Describes a pre-tokenizer, which splits texts into words before byte pairs are merged. `pattern` None is
    GPT-2's."""

    pattern: str | None = None
    digits: bool = False  # every digit is a word
    composed: bool = False  # texts are normalized to NFC first
    whole_words: bool = False  # a word that is a token stays whole
    bos: bool = False  # whether a text begins with BOS if the file does not specify it


_CUTS: Final = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "phi-2", "jais", "trillion"), _Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), _Cut(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Cut(_LLAMA3, whole_words=True, bos=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Cut(_QWEN, composed=True)),
    "tekken": _Cut(_TEKKEN, whole_words=True, bos=True),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Holds the contents of a folder's tokenizer files, and the ids and size that the config needs."""

    tokenizer: dict[str, Any]  # tokenizer.json
    settings: dict[str, Any]  # tokenizer_config.json
    ends: tuple[int, ...]  # ids of the tokens that end a text
    bos: int | None
    size: int  # tokens
    templates: Mapping[str, str]  # file name → template


def vocabulary_of(fields: Fields, pre: str | None) -> GgufVocabulary:
    """Converts the vocabulary. `pre` names the pre-tokenizer to use if the file names none. Raises BadFile, which names
    the key."""
    tokens = _texts(fields, TOKENS)
    kinds = _kinds(fields, tokens)
    vocabulary = _ids(fields, tokens, kinds)
    found = {role: _id(fields, role, tokens) for role in (*_ROLES, "eot", "eom")}
    known = {role: number for role, number in found.items() if number is not None}
    if fields.raw.get(TYPES) is None:
        for number in known.values():
            kinds[number] = _CONTROL
    model = fields.raw.get(MODEL)
    if model == "llama":
        parts, bos = _pieces(fields, vocabulary, kinds, known), True
    elif model == "gpt2":
        cut = _cut(fields, pre)
        parts, bos = _pairs(fields, vocabulary, cut), cut.bos
    else:
        fields.refuse(MODEL, f"{short(model)} is not served", "use one of llama, gpt2")
    apart = [(number, kind) for number, kind in enumerate(kinds) if kind in (_CONTROL, _USER)]
    tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None},
        "added_tokens": [_added(number, tokens[number], kind) for number, kind in apart],
        **parts,
        "post_processor": _around(fields, tokens, known, bos),
    }
    settings: dict[str, Any] = {f"{name}_token": tokens[known[role]] for role, name in _ROLES.items() if role in known}
    settings |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    ending = [number for number, kind in apart if kind == _CONTROL and tokens[number] in _ENDING]
    ends = tuple(dict.fromkeys([*(known[role] for role in _ENDS if role in known), *ending]))
    return GgufVocabulary(tokenizer, settings, ends, known.get("bos"), len(tokens), _templates(fields))


def _texts(fields: Fields, key: str) -> list[str]:
    found = fields.raw.get(key)
    if not isinstance(found, list) or not found:
        fields.refuse(key, "must be an array of texts", MEND)
    return found


def _kinds(fields: Fields, tokens: Sequence[str]) -> list[int]:
    """Returns the type of each token; without types in the file, all tokens are normal."""
    found = fields.raw.get(TYPES)
    if found is None:
        return [_NORMAL] * len(tokens)
    return [int(kind) for kind in _numbers(fields, TYPES, len(tokens))]


def _numbers(fields: Fields, key: str, count: int) -> Sequence[float]:
    found = fields.raw.get(key)
    if found is None or isinstance(found, str | list) or not hasattr(found, "typecode"):
        fields.refuse(key, "must be an array of numbers", MEND)
    if len(found) != count:
        fields.refuse(key, f"has {len(found)} numbers for {count} tokens", MEND)
    numbers: Sequence[float] = found
    return numbers


def _ids(fields: Fields, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Maps tokens to ids, without the tokens that only pad the embedding."""
    found: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if kinds[number] == _UNUSED and token == f"[PAD{number}]":
            continue
        if found.setdefault(token, number) != number:
            fields.refuse(TOKENS, f"{short(token)} is both token {found[token]} and token {number}", MEND)
    return found


def _id(fields: Fields, role: str, tokens: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if fields.raw.get(key) in (None, 0xFFFFFFFF):
        return None
    return fields.integer(key, maximum=len(tokens) - 1)


def _added(number: int, token: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": kind == _CONTROL}


def _around(fields: Fields, tokens: Sequence[str], known: Mapping[str, int], bos: bool) -> dict[str, Any] | None:
    """Builds the post-processor that adds BOS before a text and EOS after it, or returns None if the file wants
    neither."""
    before = fields.boolean("tokenizer.ggml.add_bos_token", default=bos) and "bos" in known
    after = fields.boolean("tokenizer.ggml.add_eos_token", default=False) and "eos" in known
    if not before and not after:
        return None
    first = [_special(tokens[known["bos"]], 0)] if before else []
    last = [_special(tokens[known["eos"]], 0)] if after else []
    second = [_special(tokens[known["bos"]], 1)] if before else []
    end = [_special(tokens[known["eos"]], 1)] if after else []
    used = [known["bos"]] * before + [known["eos"]] * after
    return {
        "type": "TemplateProcessing",
        "single": [*first, _sequence("A", 0), *last],
        "pair": [*first, _sequence("A", 0), *last, *second, _sequence("B", 1), *end],
        "special_tokens": {tokens[one]: {"id": tokens[one], "ids": [one], "tokens": [tokens[one]]} for one in used},
    }


def _special(token: str, sequence: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": sequence}}


def _sequence(name: str, number: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": number}}


def _model(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **flags: object) -> dict[str, Any]:
    fixed = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {**fixed, **flags, "vocab": vocabulary, "merges": merges}


def _cut(fields: Fields, pre: str | None) -> _Cut:
    name = fields.raw.get(PRE)
    if name in (None, "default") and pre is not None:
        name = pre
    if name in (None, "default"):
        fields.refuse(
            PRE, "is missing: how texts are cut is not known", "convert the model again with a llama.cpp of today"
        )
    if not isinstance(name, str) or name not in _CUTS:
        fields.refuse(PRE, f"{short(name)} is not served", f"use one of {', '.join(sorted(_CUTS))}")
    return _CUTS[name]


def _pairs(fields: Fields, vocabulary: Mapping[str, int], cut: _Cut) -> dict[str, Any]:
    """Builds a byte-level BPE tokenizer, whose pieces spell bytes as letters."""
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(_texts(fields, MERGES)):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            fields.refuse(MERGES, f"{short(merge)} (number {number}) does not join two tokens to a third", MEND)
        merges.append((left, right))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cut.pattern is None}
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if cut.digits else []
    if cut.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False})
    flags = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": cut.whole_words}
    return {
        "normalizer": {"type": "NFC"} if cut.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]} if steps else level,
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": _model(vocabulary, merges, **flags),
    }


def _pieces(
    fields: Fields, vocabulary: Mapping[str, int], kinds: Sequence[int], known: Mapping[str, int]
) -> dict[str, Any]:
    """Builds a SentencePiece tokenizer: blanks become ▁, and text that no piece spells falls back to bytes."""
    scores = _numbers(fields, SCORES, len(kinds))
    plain = {piece: number for piece, number in vocabulary.items() if kinds[number] == _NORMAL}
    try:
        merges = merges_of(plain, {piece: scores[number] for piece, number in plain.items()})
    except VocabularyTooLarge:
        fields.refuse(TOKENS, "has pieces longer than those of any model", MEND)
    prefixed = fields.boolean("tokenizer.ggml.add_space_prefix", default=True)
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, blank]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    unknown = next((piece for piece, number in vocabulary.items() if number == known.get("unknown")), None)
    flags = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if prefixed else blank,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, *strip]},
        "model": _model(vocabulary, merges, **flags),
    }


def _templates(fields: Fields) -> dict[str, str]:
    places = {"": "chat_template.jinja", ".tool_use": "additional_chat_templates/tool_use.jinja"}
    found: dict[str, str] = {}
    for suffix, place in places.items():
        key = f"tokenizer.chat_template{suffix}"
        source = fields.raw.get(key)
        if source is not None and not isinstance(source, str):
            fields.refuse(key, "must be a text", MEND)
        if source:
            found[place] = source
    return found
