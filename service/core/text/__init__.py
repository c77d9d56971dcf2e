"""Converts text to token ids and back. Knows no gRPC and no engine.

Tokenizer.load(folder)          reads a model folder; raises engine.errors.InvalidModel, one line, file and remedy
Tokenizer.of_bytes()            one id a byte, 256 in all, with a plain chat template: for the fake engine
    .encode(text)               list[int], as transformers does: special tokens in it count, BOS where the model has one
    .encode_chat(messages, options)  list[int] of ChatMessage and ChatOptions, as apply_chat_template does it; raises
                                ChatTemplateError, its text safe to send
    .least_tokens(text)         a floor on len(encode(text)), cheap: refuse a giant prompt before it is encoded
    .decode(ids)                str, special tokens left out
    .vocab_size .digest .chat (bool) .eos_token_ids (tuple) .default_sampling (SamplingDefaults, None where unset)

processes.TextProcesses(folder)     where whatever is not short is done, beside the event loop and under limits;
                            not imported here, since the processes themselves import this

Detokenizer(tokenizer, stop_strings=(), include_stop=False, min_tokens=0, continues=False)
    .push(ids)                  Piece(text, stop, ids, cuts)
    .feed(id)                   the same of one id where there are no stop strings: two texts; else None
    .flush()                    Piece, what was withheld; call it once, when no more ids come and no stop matched

`Piece.text` is whole characters, to be sent now. `Piece.stop` is the stop string that matched, else None; the text then
ends there. `Piece.ids` is how many of the pushed ids belong to the answer: all of them, unless a stop matched.
`Piece.cuts` says where in the text each of them ends, the last one left out, so that a piece can be cut between ids.
`continues`: the answer goes on from a text (input `text` or `token_ids`), so that a leading space is part of it;
False where it stands alone (`chat`).
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
