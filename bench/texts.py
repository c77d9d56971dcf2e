"""Prompts of real text: of the modules that the demo models never saw, as this machine's Python brings them."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from models.train.chat import END, START
from models.train.corpus import held_out_names, is_test

SETS = ("edit", "quote", "code", "prose", "chat")
COPYING = ("edit", "quote")
PASSAGE, HINT = 1600, 160  # characters: of what is to be copied, and of the copy's beginning
OPENING = 800  # characters of a file, to be gone on with


def modules() -> dict[str, str]:
    """Held-out modules by name, without tests: some systems install none."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name, split in held_out_names().items() if split == "heldout" and not is_test(name)]
    return {name: (lib / name).read_text("utf-8") for name in names}


def prompts(name: str, tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Of a set, at most so many."""
    texts = [text for _, text in zip(range(count), _texts(name), strict=False)]
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def _texts(name: str) -> Iterator[str]:
    for path, text in modules().items():
        start = text.index("\n", len(text) // 3) + 1
        if name == "edit":
            passage = _cut(text, 0, PASSAGE)
            yield f"{passage}\n\n# The same file, edited:\n\n{_cut(passage, 0, HINT)}"
        elif name == "quote":
            passage = _cut(text, start, PASSAGE)
            yield f"{passage}\n\n# Quoted from above:\n\n{_cut(passage, 0, HINT)}"
        elif name == "code":
            yield _cut(text, start, OPENING)
        elif name == "prose":
            if prose := _prose(text):
                yield _cut(prose, 0, OPENING)
        else:
            module = path.removesuffix(".py").replace("/", ".")
            asked = f"What does the {module} module do?"
            yield f"{START}user\n{asked}{END}\n{START}assistant\n"


def _cut(text: str, start: int, length: int) -> str:
    """About so many characters, without the last line break: that belongs to the next line's indentation."""
    return text[start : text.rindex("\n", start, start + length)] if len(text) > start + length else text[start:]


def _prose(text: str) -> str:
    """A module's longest docstring."""
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    return max((ast.get_docstring(node) or "" for node in nodes), key=len)
