"""The first step: from a CPython `Lib/` to a tokenizer, token arrays and a description of the corpus."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from models.train import tokenizer as bpe
from models.train import tokens
from models.train.corpus import Document, Split, documents

TOKENIZER_FOLDER = "tokenizer"
TOKENS_FILE = "tokens.npz"
CORPUS_FILE = "corpus.json"
LINE = 40  # characters from which a held-out line counts as more than boilerplate


@dataclass(frozen=True)
class Corpus:
    """`digest` is over names and texts of all splits in order; `repeated_lines` is the share of held-out lines of LINE
    characters or more that training text holds too."""

    python: str
    digest: str
    documents: dict[str, int]
    text_bytes: dict[str, int]
    tokens: dict[str, int]
    repeated_lines: float
    heldout_names: list[str]


def prepare(lib: Path, work: Path) -> Corpus:
    splits = documents(lib)
    tokenizer = bpe.train(document.text for document in splits["train"])
    bpe.write(tokenizer, work / TOKENIZER_FOLDER)
    streams = {split: tokens.encode(tokenizer, splits[split]) for split in tokens.SPLITS}
    tokens.save(work / TOKENS_FILE, streams)
    corpus = Corpus(
        python=platform.python_version(),
        digest=digest(splits),
        documents={split: len(splits[split]) for split in tokens.SPLITS},
        text_bytes={split: streams[split].text_bytes for split in tokens.SPLITS},
        tokens={split: len(streams[split].ids) for split in tokens.SPLITS},
        repeated_lines=repeated_lines(splits["train"], splits["heldout"]),
        heldout_names=[document.name for document in splits["heldout"]],
    )
    (work / CORPUS_FILE).write_text(json.dumps(asdict(corpus), indent=2) + "\n", "utf-8")
    return corpus


def read_corpus(work: Path) -> Corpus:
    return Corpus(**json.loads((work / CORPUS_FILE).read_text("utf-8")))


def digest(splits: dict[Split, list[Document]]) -> str:
    total = hashlib.sha256()
    for split in tokens.SPLITS:
        for document in splits[split]:
            for part in (split, document.name, document.text):
                content = part.encode("utf-8")
                total.update(len(content).to_bytes(8, "big"))
                total.update(content)
    return total.hexdigest()


def repeated_lines(seen: Sequence[Document], unseen: Sequence[Document]) -> float:
    known = {line.strip() for document in seen for line in document.text.splitlines()}
    lines = [line.strip() for document in unseen for line in document.text.splitlines()]
    long = [line for line in lines if len(line) >= LINE]
    return sum(line in known for line in long) / len(long) if long else 0.0
