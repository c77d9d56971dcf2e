"""Makes workloads of benches: sizes by name, arrivals, traces, prompts of real text; and keeps lists of records.

`nN`: N requests at once, of `prompt` tokens in and `tokens` out. `firstN`: one of N tokens in and two out. `mixed256`:
256 of 100 to 1,024 in and out. `short1024`: 1,024 of 128 in and out.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from bench.serving.jobs import LoadRequest

Work = list[tuple[int, int]]  # of each request, tokens in and out
# Of a record; two of the same are of one measurement. Flags are there where a server was started with any.
NAMES = ("device", "model", "path", "workload", "revision", "flags")


def workload(name: str, prompt: int, tokens: int) -> Work:
    if name == "mixed256":
        generator = random.Random(5)
        return [(generator.randint(100, 1024), generator.randint(100, 1024)) for _ in range(256)]
    if name == "short1024":
        return [(128, 128)] * 1024
    if name.startswith("first") and name[5:].isdigit():
        return [(int(name[5:]), 2)]
    if name[:1] != "n" or not name[1:].isdigit():
        raise ValueError(f"{name!r} is no workload")
    return [(prompt, tokens)] * int(name[1:])


def append(path: Path, records: list[dict[str, object]], names: tuple[str, ...] = NAMES) -> None:
    """Adds to the list in a file, in place of what it has of the same names."""
    held = json.loads(path.read_text()) if path.exists() else []

    def named(one: dict[str, object]) -> str:
        return json.dumps([one.get(name) for name in names])

    fresh = set(map(named, records))
    kept = [one for one in held if named(one) not in fresh]
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in [*kept, *records]) + "\n]\n")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a block trace: equal numbers are equal blocks with equal prefixes."""

    blocks: tuple[int, ...]
    tokens: int
    answer: int = 0  # tokens
    at: float = 0.0  # seconds after the trace began


@dataclass(frozen=True, slots=True)
class Labelled:
    text: str
    intent: str


def read_blocks(path: Path) -> list[TraceRequest]:
    """Reads Mooncake's format, one JSON object a line. Raises ValueError."""
    rows = (json.loads(line) for line in _text(path).splitlines() if line.strip())
    try:
        return [
            TraceRequest(
                blocks=tuple(map(int, row["hash_ids"])),
                tokens=int(row["input_length"]),
                answer=int(row.get("output_length", 0)),
                at=float(row.get("timestamp", 0)) / 1000,
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a block trace: {error}") from None


def read_labelled(path: Path, parts: Sequence[str] = ("test",)) -> list[Labelled]:
    """Reads CLINC150's format: {part: [[text, intent], …]}. Raises ValueError."""
    try:
        found: Any = json.loads(_text(path))
        return [Labelled(str(text), str(intent)) for part in parts for text, intent in found[part]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a set of labelled questions: {error}") from None


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


@dataclass(frozen=True, slots=True)
class Source:
    """Makes requests without times: all of one size, or those of a file over and over."""

    prompt: int
    tokens: int
    read: tuple[LoadRequest, ...] = ()

    def take(self, count: int) -> list[LoadRequest]:
        if not self.read:
            return [LoadRequest(number, self.prompt, self.tokens) for number in range(count)]
        return [msgspec.structs.replace(self.read[at % len(self.read)], number=at) for at in range(count)]


def read_prompts(path: Path, tokens: int) -> tuple[LoadRequest, ...]:
    """Reads a text a line, or an object with `text` and optionally `max_tokens`. Raises ValueError."""
    found: list[LoadRequest] = []
    for line in path.read_text().splitlines():
        if line.strip():
            row: Any = json.loads(line) if line.lstrip().startswith("{") else {"text": line}
            if not isinstance(row.get("text"), str):
                raise ValueError(f"{path}: a prompt has no text")
            found.append(LoadRequest(len(found), 0, int(row.get("max_tokens", tokens)), text=row["text"]))
    if not found:
        raise ValueError(f"{path}: no prompts")
    return tuple(found)


def of_workload(name: str, prompt: int, tokens: int) -> list[LoadRequest]:
    """Makes the requests of a workload, all of which begin at once."""
    return [LoadRequest(at, *sizes) for at, sizes in enumerate(workload(name, prompt, tokens))]


def poisson(rate: float, seconds: float, source: Source, seed: int) -> list[LoadRequest]:
    """Makes independent arrivals, `rate` a second on average."""
    generator, at, times = random.Random(seed), 0.0, list[float]()
    while (at := at + generator.expovariate(rate)) < seconds:
        times.append(at)
    return [msgspec.structs.replace(request, at=at) for request, at in zip(source.take(len(times)), times, strict=True)]


def of_trace(path: Path, speed: float, limit: int | None, max_context: int) -> tuple[list[LoadRequest], int]:
    """Returns a block trace at its own times, `speed` times as fast, and how many of its requests are too long for the
    model. Raises ValueError."""
    trace = read_blocks(path)[:limit]
    fit = [one for one in trace if one.answer and one.tokens + one.answer <= max_context]
    if not fit:
        raise ValueError(f"{path}: no request fits into {max_context} tokens")
    requests = [
        LoadRequest(at, one.tokens, one.answer, one.at / speed, blocks=one.blocks) for at, one in enumerate(fit)
    ]
    return requests, len(trace) - len(fit)


def rates(text: str) -> Sequence[float]:
    """Parses `1,2.5,4`, all above zero. Raises ValueError."""
    found = [float(part) for part in text.split(",")]
    if min(found) <= 0:
        raise ValueError
    return found


def counts(text: str) -> Sequence[int]:
    """Parses `1,2,4`, all above zero. Raises ValueError."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


SETS = ("edit", "quote", "code", "prose", "chat")
COPYING = ("edit", "quote")
PASSAGE, HINT = 1600, 160  # characters: of what is to be copied, and of the copy's beginning
_LONG = 8_000  # characters
OPENING = 800  # characters of a file, to be gone on with


def modules() -> dict[str, str]:
    """Returns held-out modules by name, without tests: some systems install none. An installed wheel has no list of
    what the demo models learnt; there the first modules of some length serve."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    try:
        from models.train.corpus import held_out_names, is_test
    except ImportError:
        return {path.name: text for path in sorted(lib.glob("*.py")) if len(text := path.read_text("utf-8")) > _LONG}
    names = [name for name, split in held_out_names().items() if split == "heldout" and not is_test(name)]
    return {name: (lib / name).read_text("utf-8") for name in names}


def prompts(name: str, tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Returns at most `count` prompts of a set."""
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
            yield f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def _cut(text: str, start: int, length: int) -> str:
    """Cuts about `length` characters, without the last line break: that belongs to the next line's indentation."""
    return text[start : text.rindex("\n", start, start + length)] if len(text) > start + length else text[start:]


def _prose(text: str) -> str:
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    return max((ast.get_docstring(node) or "" for node in nodes), key=len)
