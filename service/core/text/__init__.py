"""Converts text to token ids and back, as transformers does. Knows no gRPC and no engine.

A `Piece` is whole characters, to be sent now, up to the `stop` string if one matched; `ids` of the pushed ids belong to
the answer, and `cuts` says where in the text each but the last ends. `processes` is not imported here, since the text
processes import this.
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
