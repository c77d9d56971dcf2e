"""Reads our Dockerfile: what each stage does, and how a container of a target is started."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str


@dataclass(frozen=True, slots=True)
class Stage:
    """`base` is the name of a stage, an image, or `scratch`."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


@dataclass(slots=True)
class Image:
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    ports: tuple[int, ...] = ()
    volumes: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for logical in re.split(r"(?<!\\)\n", "\n".join(lines)):
        whole = re.sub(r"\s*\\\n\s*", " ", logical).strip()
        if whole:
            word, _, rest = whole.partition(" ")
            yield Instruction(word.upper(), rest.strip())


def stages(text: str, arguments: Mapping[str, str]) -> dict[str, Stage]:
    """Returns stages by name, the last one last. `arguments` are the build's."""
    found: dict[str, Stage] = {}
    name, base, inside = "", "", list[Instruction]()
    for one in (*instructions(text), Instruction("FROM", "end AS end")):
        if one.word != "FROM":
            inside.append(one)
            continue
        if name:
            found[name] = Stage(name, base, tuple(inside))
        base, _, name = expand(one.rest, arguments).partition(" AS ")
        inside = []
    return found


def expand(text: str, known: Mapping[str, str]) -> str:
    """Variables replaced; those that are unknown by nothing."""
    return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], ""), text)


def image(found: Mapping[str, Stage], target: str) -> Image:
    """Returns the configuration of a stage's container, including that of its bases."""
    stage = found[target]
    made = image(found, stage.base) if stage.base in found else Image()
    for one in stage.instructions:
        apply(made, one)
    return made


def apply(made: Image, one: Instruction) -> None:
    """Enters an instruction that changes no file."""
    match one.word:
        case "ENV" | "LABEL":
            pairs = dict(part.split("=", 1) for part in shlex.split(one.rest))
            (made.env if one.word == "ENV" else made.labels).update(pairs)
        case "USER":
            made.user = one.rest
        case "WORKDIR":
            made.folder = one.rest
        case "EXPOSE":
            made.ports += tuple(map(int, one.rest.split()))
        case "VOLUME":
            made.volumes += tuple(one.rest.split())
        case "HEALTHCHECK":
            made.health = tuple(json.loads(one.rest.partition("CMD ")[2]))
        case "ENTRYPOINT":
            made.entrypoint = tuple(json.loads(one.rest))
        case "CMD":
            made.command = tuple(json.loads(one.rest))


def kept(ignored: str, name: str) -> bool:
    """Whether a file of the tree reaches the build, by the lines of our .dockerignore: nothing, but for `!…`, and of
    that nothing that a later line names again."""
    lines = [line for line in ignored.splitlines() if line and not line.startswith("#")]
    allowed = [line[1:] for line in lines if line.startswith("!")]
    path = Path(name)
    denied = [line.removesuffix("/*") for line in lines[1:] if not line.startswith("!")]
    return any(path.is_relative_to(one) for one in allowed) and not any(path.is_relative_to(one) for one in denied)
