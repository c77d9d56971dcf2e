"""Renders chat templates: messages to the text that the model was trained on.

A template is not trusted: it runs in Jinja's immutable sandbox with bounded output, and unless it is plain, only in
text processes. What users write is data to it and never compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.core.text.conversation import ChatTemplateError
from service.core.text.plain_template import MAX_SOURCE, is_plain
from service.core.text.template_needs import looks_into_content, mentions_tools

MAX_CHARS = 4 * 2**20  # twice the largest chat
MAX_MESSAGE = 500  # characters of an error that the caller gets
_CONTINUE = "GO0ON0FROM0HERE"  # letters and digits: no filter escapes them

# What a template does wrong comes out as one of these.
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Refusal(TemplateError):
    pass


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dumps plain JSON: jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """`plain`: the event loop may render it for a short chat. `takes_tools`: the template would not leave tools out;
    `takes_lists`: it can render lists. A template too large to parse counts as taking both."""

    def __init__(self, source: str, special: dict[str, str], only_plain: bool = False) -> None:
        """With `only_plain`, compiles no other template, since that runs its constant parts. Raises ValueError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            parsed = environment.parse(source) if len(source) <= MAX_SOURCE else None
            self.plain = parsed is not None and is_plain(parsed)
            self.takes_tools = parsed is None or mentions_tools(parsed)
            self.takes_lists = parsed is None or looks_into_content(parsed)
            compiled = self.plain or not only_plain
            self._template = environment.from_string(source) if compiled else None
        except (TemplateSyntaxError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self._special = dict(special)
        self.source = source

    def render(self, variables: dict[str, Any], continues: bool = False) -> str:
        """With `continues`, renders up to the end of the last message's text. Raises ChatTemplateError."""
        if not self._special.keys().isdisjoint(variables):
            raise ChatTemplateError("template_arguments: names that the model's tokenizer gives the template are taken")
        if continues and "content" not in self.source:
            raise ChatTemplateError("the model's chat template knows no content that could be continued")
        if continues:
            return _continued(variables, self._made)
        return self._made(variables)

    def _made(self, variables: dict[str, Any]) -> str:
        if self._template is None:
            raise ChatTemplateError("the model's chat template is not rendered here")
        try:
            return _bounded(self._template.generate({**self._special, **variables}))
        except _Refusal as error:
            message = error.message or "the model's chat template refuses these messages"
            raise ChatTemplateError(message[:MAX_MESSAGE]) from error
        except _FAULTS as error:
            message = f"the model's chat template cannot render these messages: {error}"
            raise ChatTemplateError(message[:MAX_MESSAGE]) from error


def _continued(variables: dict[str, Any], render: Callable[[dict[str, Any]], str]) -> str:
    """Finds the end of the last message by a tag behind its text. The tag ends in a blank, which is gone where the
    template trims; then the text before is trimmed as well."""
    *before, last = variables["messages"]
    content = last["content"]
    if content is None:
        raise ChatTemplateError("the last message has no content that could be continued")
    if isinstance(content, list):
        *parts, part = content
        content = part["text"]
        tagged: Any = [*parts, {**part, "text": content + _CONTINUE + " "}]
    else:
        tagged = content + _CONTINUE + " "
    rendered = render({**variables, "messages": [*before, {**last, "content": tagged}]})
    at = rendered.rfind(_CONTINUE)
    if at < 0 or content.strip() not in rendered:
        raise ChatTemplateError("the model's chat template leaves out the content that should be continued")
    kept = rendered[at + len(_CONTINUE) :].startswith(" ")
    return rendered[:at] if kept else rendered[:at].rstrip()


def _bounded(made: Iterator[str]) -> str:
    parts: list[str] = []
    size = 0
    for part in made:
        parts.append(part)
        size += len(part)
        if size > MAX_CHARS:
            raise ChatTemplateError("the chat is too long once the model's template is applied")
    return "".join(parts)


def choose_templates(value: object) -> dict[str, str]:
    """Reads `chat_template` of tokenizer_config.json: a text (named "default"), a list of named texts, or a table.
    Raises ValueError for anything else."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (KeyError, TypeError) as error:
            raise ValueError("a list of templates needs a name and a template in each") from error
    if isinstance(value, dict) and all(isinstance(source, str) for source in value.values()):
        return value
    raise ValueError("neither a text nor a table of texts")
