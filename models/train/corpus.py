"""Which text the demo models learn from: files of a CPython `Lib/`, split by name, and conversations made of them."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal

from models.train import chat

Split = Literal["train", "valid", "heldout"]

# site-packages and lib-dynload are not CPython's text; the rest is generated for one machine or is no Python 3.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "lib-dynload", "__pycache__", "__phello__", "_bundled", "encoded_modules"}
)
EXCLUDED_FILES = re.compile(
    r"^(_sysconfigdata.*|pydoc_data/topics|__hello__|lib2to3/tests/data/.*|encodings/(cp|mac_|iso8859).*)\.py$"
)
MAX_BYTES = 400_000
MAX_TABLE_SHARE = 0.15  # of a file's characters: digits and backslashes
LIBRARY_REPEATS = 2  # modules and topics, against one of each test file
SEED = 20


@dataclass(frozen=True)
class Document:
    """One training document; `name` is its path in Lib/, or `chat:` and the module it speaks of."""

    name: str
    text: str


def held_out_names() -> dict[str, Split]:
    """Path in Lib/ → the split that keeps it from training."""
    splits: dict[str, Split] = {}
    for line in resources.files("models.train").joinpath("heldout.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            split, name = line.split()
            if split not in ("valid", "heldout"):
                raise ValueError(f"heldout.txt: unknown split {split!r}")
            splits[name] = "valid" if split == "valid" else "heldout"
    return splits


def is_test(name: str) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in PurePosixPath(name).parts)


def source_files(lib: Path) -> Iterator[Document]:
    """Every usable .py file below `lib`, in the order of its name."""
    for path in sorted(lib.rglob("*.py"), key=lambda path: path.relative_to(lib).as_posix()):
        name = path.relative_to(lib).as_posix()
        if EXCLUDED_FOLDERS.intersection(PurePosixPath(name).parts) or EXCLUDED_FILES.match(name):
            continue
        if name.startswith("config-") or path.stat().st_size > MAX_BYTES:
            continue
        text = _decode(path.read_bytes())
        if text is not None and text.strip() and not is_table(text):
            yield Document(name, text)


def is_table(text: str) -> bool:
    return sum(character.isdigit() or character == "\\" for character in text) > MAX_TABLE_SHARE * len(text)


def topics(lib: Path) -> dict[str, str]:
    """pydoc's help topics: label → text."""
    path = lib / "pydoc_data" / "topics.py"
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            entries: dict[str, str] = ast.literal_eval(node.value)
            return entries
    return {}


def documents(lib: Path) -> dict[Split, list[Document]]:
    """The three splits; training text in a fixed shuffled order, the others by name."""
    held = held_out_names()
    splits: dict[Split, list[Document]] = {"train": [], "valid": [], "heldout": []}
    library: list[Document] = []
    for document in source_files(lib):
        split = held.get(document.name, "train")
        (library if split == "train" and not is_test(document.name) else splits[split]).append(document)
    missing = [name for name in held if not is_test(name) and not (lib / name).exists()]
    if missing:
        raise ValueError(f"{lib} lacks held-out modules: {', '.join(missing)}")
    help_topics = topics(lib)
    library.extend(Document(f"topic:{label}", text.strip() + "\n") for label, text in sorted(help_topics.items()))
    splits["train"].extend(library * LIBRARY_REPEATS)
    for document in library:
        if document.name.endswith(".py"):
            splits["train"].extend(_spoken(document.name, chat.about_module(document.name, document.text)))
    splits["train"].extend(_spoken("topics", chat.about_topics(help_topics)))
    splits["train"].extend(_spoken("whippet", chat.about_itself()))
    random.Random(SEED).shuffle(splits["train"])
    return splits


def _spoken(source: str, conversations: Iterator[chat.Conversation]) -> Iterator[Document]:
    return (Document(f"chat:{source}", chat.render(conversation)) for conversation in conversations)


def _decode(content: bytes) -> str | None:
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
