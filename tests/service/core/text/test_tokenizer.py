"""The oracle is transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidModel
from service.core.text import ChatMessage, SamplingDefaults, Tokenizer
from service.core.text.tokenizer import MOST_TEXT
from tests.properties import example_count

Folder = Callable[..., Path]
TEXTS = [
    "",
    "Hello, world",
    " two  spaces ",
    "naïve 日本 🙂 e\u0301",
    "</s> in <s>text<|im_end|>\n",
    "\x00\x7f\uffff",
    "a" * 5000,
]


def oracle(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)


RULES: dict[str, dict[str, Any]] = {
    "as the vocabulary says": {},
    "bos": {"bos_token": "<s>", "add_bos_token": True},
    "bos off": {"bos_token": "<s>", "add_bos_token": False},
    "bos without a token": {"add_bos_token": True},
    "bos and eos": {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": True},
    "eos alone": {"bos_token": "<s>", "add_eos_token": True},
    "tokens with flags": {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": True, "normalized": False,
                      "single_word": False},
        "add_bos_token": True,
    },
    "declared tokens": {
        "bos_token": "<think>",
        "add_bos_token": True,
        "added_tokens_decoder": {
            "1": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
                  "special": True},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_ids_are_those_of_transformers(folder: Folder, kind: str, rule: str) -> None:
    if kind != "byte-level" and rule == "declared tokens":
        rule = "bos"  # <think> is in one vocabulary only
    path = folder(kind, RULES[rule])
    ours, theirs = Tokenizer.load(path), oracle(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.vocab_size == len(theirs)


def test_special_tokens_map_counts_where_the_settings_are_old(folder: Folder) -> None:
    files = {"special_tokens_map_json": {"eos_token": "<|im_end|>"}, "chat_template_jinja": "{{ eos_token }}"}
    for settings_, expected in (({}, 4), ({"added_tokens_decoder": {}}, 2)):
        path = folder("byte-level", settings_, **files)
        ours, theirs = Tokenizer.load(path), oracle(path)
        assert ours.eos_token_ids == (theirs.eos_token_id,) == (expected,)
        assert ours.encode_chat([ChatMessage("user", "x")]) == [expected]


@pytest.mark.parametrize("flags", [None, {"__type": "AddedToken", "lstrip": True}])
def test_an_ordinary_token_with_a_role_becomes_special(
    folder: Folder, loaded: Callable[[str], Tokenizer], flags: dict[str, Any] | None
) -> None:
    word = "parser"
    assert len(loaded("byte-level").encode(word)) == 1
    path = folder("byte-level", {"pad_token": word if flags is None else {**flags, "content": word}})
    ours, theirs = Tokenizer.load(path), oracle(path)
    text = f"a {word} {word}s <think>"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert word not in ours.decode(ours.encode(text))


def test_a_vocabulary_with_truncation_and_padding_does_neither(folder: Folder) -> None:
    path = folder("byte-level")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "<unk>"}  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Tokenizer.load(path).encode("parser") == oracle(path)("parser")["input_ids"]
    assert len(Tokenizer.load(path).encode("q z q z q z q z")) > 3


@given(text=st.text(max_size=60))
@settings(max_examples=example_count(200), deadline=None)
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_text_comes_back(loaded: Callable[[str], Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded(kind)
    import unicodedata

    expected = unicodedata.normalize("NFC", text) if kind == "byte-level" else text
    special = ("<", "漢字", "\u2581")  # spelled specials vanish; ▁ is a space
    if not any(part in text for part in special):
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.fixture(scope="module")
def loaded(folder: Folder) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in made:
            made[kind] = Tokenizer.load(folder(kind))
        return made[kind]

    return get


@given(text=st.text(max_size=80))
@settings(max_examples=example_count(200), deadline=None)
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_least_tokens_is_a_floor(loaded: Callable[[str], Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded(kind)
    assert tokenizer.least_tokens(text * 9) <= len(tokenizer.encode(text * 9))


def test_least_tokens_knows_that_characters_join(loaded: Callable[[str], Tokenizer]) -> None:
    text = "e\u0301" * 100  # 200 characters, two tokens
    assert len(loaded("byte-level").encode(text)) == 2
    assert loaded("byte-level").least_tokens(text) <= 2


def test_least_tokens_refuses_a_giant(loaded: Callable[[str], Tokenizer]) -> None:
    assert loaded("byte-level").least_tokens("x" * 10**7) > 10_000
    assert loaded("metaspace").least_tokens("x" * 10**7) == 0
    assert Tokenizer.of_bytes().least_tokens("x" * 1000) > 0


def test_least_tokens_counts_bytes(loaded: Callable[[str], Tokenizer]) -> None:
    """Of byte tokens it is exact."""
    for text in ("", "x" * 1000, "é" * 1000, "日本語" * 100, "🙂" * 700_000):
        size = min(len(text.encode()), len(text) if len(text) > MOST_TEXT else len(text.encode()))
        assert Tokenizer.of_bytes().least_tokens(text) == size
    assert loaded("byte-fallback").least_tokens("日" * 1000) > 100


def test_normalizing_makes_at_most_one_byte_of_four() -> None:
    """What `steps` takes for granted, shown on every character."""
    characters = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x30000))]
    longest: dict[str, int] = {}  # character → bytes of the longest one that is equal to it
    parts = {character: unicodedata.normalize("NFD", character) for character in characters}
    for character, equal in parts.items():
        if len(equal) == 1:
            longest[equal] = max(longest.get(equal, 0), len(character.encode()))
    for character, equal in parts.items():
        size = sum(longest[part] for part in equal)
        assert len(character.encode()) <= max(size, longest.get(equal, 0))
        if unicodedata.normalize("NFC", character) == character:
            assert size <= 4 * len(character.encode())


def test_the_byte_tokenizer() -> None:
    tokenizer = Tokenizer.of_bytes()
    assert tokenizer.encode("hé\n") == list("hé\n".encode())
    assert tokenizer.decode(list("hé\n".encode())) == "hé\n"
    assert (tokenizer.vocab_size, tokenizer.chat, tokenizer.eos_token_ids) == (256, True, ())
    chat = tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert bytes(chat) == b"user: hi\nassistant: "
    assert tokenizer.digest == Tokenizer.of_bytes().digest


def test_digest_tells_what_decides_the_ids(folder: Folder, chatml: str) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"bos_token": "<s>"},
        {"bos_token": "<s>", "eos_token": "<|im_end|>"},
        {"chat_template": chatml},
        {"chat_template": chatml + " "},
    ]
    digests = [Tokenizer.load(folder("byte-level", variant)).digest for variant in variants]
    digests.append(Tokenizer.load(folder("byte-fallback")).digest)
    assert len(set(digests)) == len(digests)
    assert Tokenizer.load(folder("byte-level")).digest == digests[0]
    assert all(len(digest) == 64 for digest in digests)


EOS = {
    "generation config": ({"eos_token_id": [4, 3]}, {"eos_token_id": 9}, (4, 3, 2)),
    "one id": ({"eos_token_id": 2}, {}, (2,)),
    "config": ({}, {"eos_token_id": 9}, (9, 2)),
    "null": ({"eos_token_id": None}, {"eos_token_id": [7]}, (7, 2)),
    "tokenizer alone": ({}, {}, (2,)),
}


@pytest.mark.parametrize("case", EOS)
def test_eos_ids(folder: Folder, case: str) -> None:
    generation, config, expected = EOS[case]
    path = folder("byte-level", generation_config_json=generation, config_json=config)
    assert Tokenizer.load(path).eos_token_ids == expected


def test_sampling_defaults(folder: Folder) -> None:
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05,
             "max_new_tokens": 64}  # fmt: skip
    path = folder("byte-level", generation_config_json={**given, "transformers_version": "4.51"})
    assert Tokenizer.load(path).default_sampling == SamplingDefaults(**given)  # type: ignore[arg-type]
    path = folder("byte-level", generation_config_json={"top_k": -1, "top_p": None})
    assert Tokenizer.load(path).default_sampling == SamplingDefaults(top_k=0)
    assert Tokenizer.load(folder("byte-level")).default_sampling == SamplingDefaults()


def broken(path: Path, name: str, content: bytes | None) -> str:
    target = path / name
    target.unlink(missing_ok=True)
    if content is not None:
        target.write_bytes(content)
    with pytest.raises(InvalidModel) as caught:
        Tokenizer.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(target) in message
    assert "; " in message
    return message


BROKEN = {
    "missing": ("tokenizer.json", None, "no such file; write it with transformers"),
    "cut off": ("tokenizer.json", b'{"version": "1.0", "model": {', "is no tokenizer"),
    "empty": ("tokenizer.json", b"", "is no tokenizer"),
    "not a tokenizer": ("tokenizer.json", b"[1]", "is no tokenizer"),
    "binary": ("tokenizer.json", b"\xff\xfe\x00", "is no tokenizer"),
    "settings cut off": ("tokenizer_config.json", b'{"a": ', "is not JSON"),
    "settings nested": ("tokenizer_config.json", b"[" * 100_000, "is not JSON"),
    "settings a list": ("tokenizer_config.json", b"[]", "is not a JSON object"),
    "settings not text": ("tokenizer_config.json", b"\xff", "is not UTF-8"),
    "bos a number": ("tokenizer_config.json", b'{"bos_token": 5}', "is no token"),
    "wrong id": ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": {"content": "<x>"}}}', "is not token 7"),
    "ids a list": ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "is no table"),
    "template a number": ("tokenizer_config.json", b'{"chat_template": 5}', "the chat template is broken"),
    "template list": ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "the chat template is broken"),
    "template syntax": ("chat_template.jinja", b"{% for %}", "the chat template is broken"),
    "temperature": ("generation_config.json", b'{"temperature": "hot"}', "temperature is"),
    "temperature nan": ("generation_config.json", b'{"temperature": NaN}', "temperature is"),
    "top_p": ("generation_config.json", b'{"top_p": 1.5}', "top_p is 1.5"),
    "top_k": ("generation_config.json", b'{"top_k": 1.5}', "top_k is no whole number"),
    "max_new_tokens": ("generation_config.json", b'{"max_new_tokens": 0}', "not a number from 1"),
    "do_sample": ("generation_config.json", b'{"do_sample": 1}', "do_sample"),
    "eos": ("generation_config.json", b'{"eos_token_id": "</s>"}', "eos_token_id"),
    "eos negative": ("generation_config.json", b'{"eos_token_id": [-1]}', "eos_token_id"),
    "config": ("config.json", b"{", "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_named_with_its_remedy(folder: Folder, case: str) -> None:
    name, content, says = BROKEN[case]
    assert says in broken(folder("byte-level"), name, content)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="no such folder"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(InvalidModel, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_folder_with_the_vocabulary_alone(folder: Folder) -> None:
    path = folder("byte-level")
    (path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.chat, tokenizer.eos_token_ids) == (False, ())
    assert tokenizer.decode(tokenizer.encode("parser")) == "parser"


def test_bos_of_the_vocabulary_stays_where_the_settings_are_silent(folder: Folder) -> None:
    path = folder("byte-fallback")
    assert Tokenizer.load(path).encode("x")[0] == 1
