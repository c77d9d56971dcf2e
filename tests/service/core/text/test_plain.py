"""What may be done on the event loop: templates and tokenizers that are shown to be cheap, and nothing hostile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import InvalidModel
from service.core.text import ChatMessage, ChatTemplateError
from service.core.text import Tokenizer as OurTokenizer
from service.core.text.chat import ChatTemplate
from service.core.text.conversation import NO_OPTIONS, template_variables
from service.core.text.pieces import byte_letters
from service.core.text.steps import PATTERNS, is_plain
from service.core.text.tokenizer import BYTES_TEMPLATE, SHORT
from tests.service.core.text.conftest import CHATML
from tests.service.core.text.test_chat import SYSTEM_FIRST

Folder = Callable[..., Path]

TOOLS = (
    "{%- if tools %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- for call in message.tool_calls %}{{- call.name ~ (call.arguments | tojson) }}{%- endfor %}"
    "{%- elif loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{%- set content = '<|' + message.role + '|>' + message.content | trim %}{{- content + '\n' }}{%- endif %}"
    "{%- endfor %}"
)
STATE = (
    "{% set state = namespace(turns=0, last='') %}{% for message in messages %}"
    "{% set state.turns = state.turns + 1 %}{% set state.last = message.content.split('|')[-1].strip() %}"
    "{% if state.turns > 3 %}{% break %}{% endif %}{% endfor %}{{ state.last }}{{ messages[::-1] | length }}"
)
DEMO = json.loads(Path("models/demo/tokenizer_config.json").read_text())["chat_template"]
PLAIN = {
    "chatml": CHATML,
    "system first": SYSTEM_FIRST,
    "tools": TOOLS,
    "state": STATE,
    "demo": DEMO,
    "bytes": BYTES_TEMPLATE,
    "date": "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}",
}

HOSTILE = {
    "range": "{% for i in range(99999) %}{% endfor %}",
    "range by another name": "{% set r = range %}{% for i in r(99999) %}{% endfor %}",
    "sum": "{{ range(99999) | sum }}",
    "loops in loops": "{% for a in messages %}{% for b in messages %}{% for c in messages %}x{% endfor %}{% endfor %}"
    "{% endfor %}",
    "characters": "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
    "characters by key": "{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}",
    "messages are something else": "{% set messages = 'x' ~ messages[0].content %}{% for c in messages %}{% endfor %}",
    "a list that grows": "{% set rest = messages + messages %}{% for m in rest %}{% endfor %}",
    "repeated": "{{ 'a' * 1000000000 }}",
    "folded": "{{ 'a' | center(1000000000) }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format by filter": "{{ '%1000000000d' | format(1) }}",
    "format by method": "{{ '{:1000000000}'.format(1) }}",
    "replace": "{{ messages[0].content.replace('', messages[0].content) }}",
    "replace by filter": "{{ messages[0].content | replace('a', messages[0].content) }}",
    "indent": "{{ messages | tojson(indent=100000000) }}",
    "indent by filter": "{{ messages[0].content | indent(100000000) }}",
    "time": "{{ strftime_now('%1000000000Y') }}",
    "time by name": "{{ strftime_now(messages[0].content) }}",
    "doubled": "{% set a = 'x' %}{% set a = a + a %}{% set a = a + a %}{{ a }}",
    "doubled by others": "{% set a = 'x' ~ 'x' %}{% set b = a %}{% set c = b ~ b %}{{ c }}",
    "doubled in a loop": "{% set n = namespace(t='x') %}{% for m in messages %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "doubled out of sight": "{% set n = namespace(t='x') %}{% for m in messages %}{% set u = n.t ~ n.t %}"
    "{% set n.t = u %}{% endfor %}",
    "backslashes in lists": "{% set n = namespace(t=messages[0].content) %}{% for m in messages %}"
    "{% set n.t = n.t.split('|') | string %}{% endfor %}{{ n.t }}",
    "backslashes in trimmed lists": "{% set n = namespace(t=messages[0].content) %}{% for m in messages %}"
    "{% set n.t = n.t.split('|') | trim %}{% endfor %}{{ n.t }}",
    "backslashes in slices": "{% set n = namespace(t=messages[0].content) %}{% for m in messages %}"
    "{% set n.t = n.t.split('|')[0:9] | upper %}{% endfor %}{{ n.t }}",
    "a namespace in itself": "{% set n = namespace(t=messages[0].content) %}{% for m in messages %}"
    "{% set n.t = n | string %}{% endfor %}{{ n.t }}",
    "a namespace by another name": "{% set n = namespace(t=messages[0].content) %}{% set o = n %}"
    "{% for m in messages %}{% set n.t = o | string %}{% endfor %}{{ n.t }}",
    "backslashes": "{{ messages[0].content | tojson | tojson | tojson }}",
    "macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "recursive": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "block": "{% set a %}{{ messages }}{% endset %}",
    "filter block": "{% filter center(1000000000) %}x{% endfilter %}",
    "joined": "{{ messages | map(attribute='content') | join(messages[0].content) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "cycled": "{% for m in messages %}{{ loop.cycle(range(99999) | list) }}{% endfor %}",
    "filter by name": "{% for m in messages if m.content | center(99999999) %}{% endfor %}",
    "long": "{{ messages[0].content | trim }}" * 500,
    "large": "x" * 70_000,
    "deep": "{{ " + "(" * 60 + "messages" + " ~ messages)" * 60 + " * 99999 }}",
}


@pytest.mark.parametrize("name", PLAIN)
def test_templates_of_models_are_plain(name: str) -> None:
    assert ChatTemplate(PLAIN[name], {}).plain


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_not_and_is_not_compiled(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], {}, only_plain=True)  # compiled, some would take gigabytes
    assert not template.plain
    with pytest.raises(ChatTemplateError, match="not rendered here"):
        template.render(template_variables([ChatMessage("user", "x")], NO_OPTIONS))


@pytest.mark.parametrize("name", PLAIN)
def test_what_a_plain_template_makes_is_bounded_by_what_it_is_given(name: str) -> None:
    template = ChatTemplate(PLAIN[name], {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [ChatMessage("user" if turn % 2 == 0 else "assistant", 'a\\"|' * 12) for turn in range(16)]
    given = sum(len(message.role + message.content) + 64 for message in messages)
    assert len(template.render(template_variables(messages, NO_OPTIONS))) <= len(PLAIN[name]) + 8 * given


def words(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_tokenizers_that_may_take_for_ever_are_not_plain() -> None:
    fine = words(pre_tokenizers.Split(Regex(next(iter(PATTERNS))), "isolated"))
    assert is_plain(fine)
    changed = [known + more for known in PATTERNS for more in ("|(a*)*b", " ")]
    for pattern in (r"(a+)+$", r"(?:a|aa)+b", *changed):
        assert not is_plain(words(pre_tokenizers.Split(Regex(pattern), "isolated"))), pattern
    for normalizer in (
        normalizers.Replace(Regex("(a+)+$"), "b"),
        normalizers.Replace("a", "b" * 10_000),
        normalizers.Prepend("b" * 10_000),
        normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "b" * 10_000)])]),
    ):
        fine.normalizer = normalizer
        assert not is_plain(fine), normalizer
    assert not is_plain(Tokenizer(models.Unigram()))


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", " \n", "\t ", "'", "'s", "1", "!", "a'", "  x", "\u0301", "\r", "_", "é "]
)
def test_known_patterns_are_quick_with_any_text(pattern: str, unit: str) -> None:
    """Four times the text takes at most sixteen times as long, with a margin for a busy machine; what goes back over
    itself for ever takes millions of times as long, or ends in a panic."""
    tokenizer = words(pre_tokenizers.Split(Regex(pattern), "isolated"))

    def seconds(length: int) -> float:
        text = (unit * length)[:length]
        best = 1e9
        for _ in range(3):
            begun = time.thread_time()
            tokenizer.encode(text)
            best = min(best, time.thread_time() - begun)
        return best

    assert seconds(SHORT) < 100 * max(seconds(SHORT // 4), 1e-4)


@pytest.mark.parametrize("decoder", [decoders.Replace(Regex("(a+)+$"), "b"), decoders.Replace("a", "b" * 1000)])
def test_a_decoder_that_may_take_for_ever_is_refused(decoder: decoders.Decoder, tmp_path: Path) -> None:
    tokenizer = words(pre_tokenizers.Whitespace())
    tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidModel, match="a decoder"):
        OurTokenizer.load(tmp_path)
