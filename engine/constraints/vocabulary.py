"""Reads a vocabulary for grammars: the bytes of every token, and how a text is cut into tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from quant.checkpoint.gguf.file import gguf_file, is_gguf

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MARK = "<|end of a constrained answer|>"  # where a tokenizer has no special token that could stand for it


class _Bytes:
    """Serves engines without a model folder; one more token stands for the end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def read_vocabulary(folder: str) -> tuple[LLTokenizer, int]:
    """Takes a folder, a GGUF file or, empty, plain bytes. The second value is the token whose bit in a mask lets the
    answer end. Raises OSError or ValueError."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not folder:
        return LLTokenizer(TokenizerWrapper(_Bytes())), _Bytes.eos_token_id
    model = Path(folder)
    text = gguf_file(model).texts["tokenizer.json"] if is_gguf(model) else (model / "tokenizer.json").read_bytes()
    known = json.loads(text)
    added = known.setdefault("added_tokens", [])
    end = next((token["id"] for token in added if token.get("special")), None)
    if end is None:
        end = 1 + max([*known["model"]["vocab"].values(), *(token["id"] for token in added)])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": end, "content": _MARK, "special": True, **flags})
    return LLTokenizer(json.dumps(known), eos_token=end), end
