"""Parses the text of an answer's messages on their way to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from msgspec import structs

from cache.api import AnswerPart
from service.core.answers.delivery import AnswerMessage, Outlet
from service.core.parsing.answer import AnswerParser
from service.core.request import PromptFacts


class ParsedOutlet:
    """Sends no message that is withheld entirely, unless it has ids."""

    def __init__(self, outlet: Outlet, parser: AnswerParser) -> None:
        self._outlet = outlet
        self._parser = parser
        self._prompt: PromptFacts | None = None  # of a first message that was not sent

    async def begin(self, prompt: PromptFacts) -> None:
        await self._outlet.begin(prompt)

    async def send(self, message: AnswerMessage) -> None:
        text, reasoning, calls = self._parser.feed(message.text)
        if message.ending is not None:
            rest = self._parser.end()
            text, reasoning, calls = text + rest.text, reasoning + rest.reasoning, calls + rest.calls
        prompt = message.prompt or self._prompt
        if text or reasoning or calls or message.token_ids or message.prompt_ids or message.ending is not None:
            self._prompt = None
            parsed = structs.replace(message, text=text, reasoning=reasoning, calls=calls, prompt=prompt)
            await self._outlet.send(parsed)
        else:
            self._prompt = prompt


def with_marks(part: AnswerPart, marks: Mapping[int, str]) -> AnswerPart:
    """Adds marks to the text for tokens without text. The part needs `cuts`."""
    ids = part.token_ids
    if marks.keys().isdisjoint(ids):
        return part
    ends = [*part.cuts, len(part.text)]
    begins = [0, *ends[:-1]]
    texts = [
        part.text[begin:end] + marks.get(token_id, "") for begin, end, token_id in zip(begins, ends, ids, strict=True)
    ]
    return part._replace(text="".join(texts), cuts=tuple(accumulate(map(len, texts[:-1]))))
