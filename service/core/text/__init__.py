"""Converts text to token ids and back. Knows no gRPC and no engine.

`Tokenizer` encodes and decodes as transformers does: special tokens in a text count, those of a chat are the template's
own. `Detokenizer` makes a `Piece` of ids: `text` is whole characters, to be sent now; `stop`, where a stop string
matched, ends it; `ids` of the pushed ids belong to the answer; `cuts` says where in the text each but the last ends.
`continues`: the answer goes on from a text, so that a leading space is part of it. `processes.TextProcesses` does what
is not short; it is not imported here, since the processes themselves import this.
"""

from __future__ import annotations

from service.core.text.conversation import NO_OPTIONS, ChatMessage, ChatOptions, ChatTemplateError, ToolCall
from service.core.text.detokenizer import Detokenizer, Piece
from service.core.text.files import SamplingDefaults
from service.core.text.token_texts import TokenTexts
from service.core.text.tokenizer import Tokenizer

__all__ = [
    "NO_OPTIONS",
    "ChatMessage",
    "ChatOptions",
    "ChatTemplateError",
    "Detokenizer",
    "Piece",
    "SamplingDefaults",
    "TokenTexts",
    "Tokenizer",
    "ToolCall",
]
