"""The shipped tokenizer and the one that makes such tokenizers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from models.train import chat, tokenizer
from tests.properties import example_count

pytestmark = pytest.mark.product

FOLDER = Path(__file__).parents[2] / "models" / "demo"
SHIPPED = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TEMPLATE = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(chat.TEMPLATE)

any_text = st.text(st.characters(exclude_categories=["Cs"]))
code_like = st.text(alphabet=" \t\n\r\f_aZé0:(\"'\\#中\U0001f40d\u200d\u0301<|>im_start")


@cache
def hugging_face() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


def test_has_8192_tokens_and_all_bytes() -> None:
    assert SHIPPED.get_vocab_size() == 8192
    assert sorted(SHIPPED.get_vocab().values()) == list(range(8192))
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == 256
    assert alphabet <= set(SHIPPED.get_vocab())


@pytest.mark.proof
@settings(max_examples=example_count(300), deadline=None)
@given(any_text | code_like)
def test_gives_back_any_text(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.proof
@pytest.mark.parametrize("plane", range(17))
def test_gives_back_every_code_point(plane: int) -> None:
    points = [code for code in range(plane << 16, (plane + 1) << 16) if not 0xD800 <= code < 0xE000]
    text = "".join(map(chr, points))
    assert SHIPPED.decode(SHIPPED.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=example_count(100), deadline=None)
@given(any_text | code_like)
def test_transformers_reads_the_same_ids(text: str) -> None:
    assert hugging_face()(text)["input_ids"] == SHIPPED.encode(text).ids


@pytest.mark.parametrize("special", tokenizer.SPECIALS)
def test_a_special_is_one_token_that_decoding_can_skip(special: str) -> None:
    number = tokenizer.special_id(SHIPPED, special)
    assert SHIPPED.encode(f"a{special}b").ids.count(number) == 1
    assert SHIPPED.decode([number]) == ""


def test_a_line_break_takes_its_indentation_along() -> None:
    pieces = SHIPPED.encode("if x:\n        return\n\n    y").tokens
    assert "ĊĠĠĠĠĠĠĠĠ" in pieces
    assert "return" in pieces
    assert "ĊĊĠĠĠĠ" in pieces


messages = st.lists(
    st.builds(chat.Message, st.sampled_from(["system", "user", "assistant"]), any_text), min_size=1, max_size=4
).map(tuple)


@settings(max_examples=example_count(100), deadline=None)
@given(messages)
def test_template_writes_what_the_model_was_trained_on(conversation: chat.Conversation) -> None:
    plain = [{"role": message.role, "content": message.content} for message in conversation]
    assert TEMPLATE.render(messages=plain) == chat.render(conversation)
    assert hugging_face().apply_chat_template(plain, tokenize=False) == chat.render(conversation)
    opened = TEMPLATE.render(messages=plain, add_generation_prompt=True)
    assert opened == chat.render(conversation) + "<|im_start|>assistant\n"


def test_a_corpus_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="8192 are wanted"):
        tokenizer.train(["a few words only"])


def test_a_tokenizer_without_the_special_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks <\|im_end\|>"):
        tokenizer.special_id(Tokenizer(BPE()), "<|im_end|>")
