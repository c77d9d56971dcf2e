"""Lists the leaves of the settings tree, which flags, environment and YAML may name."""

from __future__ import annotations

import enum
import pathlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Path = tuple[str, ...]

_WORDS: Mapping[type, str] = {bool: "{true,false}", int: "N", float: "NUMBER", str: "TEXT", pathlib.Path: "PATH"}

# A group that also takes a plain word, and the leaf that it then means: `engine: fake` is `engine: {kind: fake}`.
PLAIN_WORDS: Mapping[Path, Path] = {("engine",): ("engine", "kind")}


@dataclass(frozen=True, slots=True)
class Leaf:
    path: Path
    type: Any
    default: object
    help: str

    @property
    def name(self) -> str:
        """The name in flags and messages: `scheduler.max-sequences`."""
        return spelled(self.path)

    @property
    def values(self) -> str:
        """Permitted values for `--help`: `{auto,cpu,cuda}`, or a word for the type, or both."""
        kind = _plain(self.type)
        if (beside := _beside(self.type)) is not None:
            return f"{{{','.join(map(str, get_args(kind)))},{_WORDS[beside]}}}"
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}"
        if issubclass(kind, enum.Enum):
            return "{" + ",".join(str(one.value) for one in kind) + "}"
        return _WORDS[kind]


def spelled(path: Path) -> str:
    return ".".join(path).replace("_", "-")


def leaves(tree: type, parents: Path = ()) -> Iterator[Leaf]:
    hints = get_type_hints(tree, include_extras=True)
    for one in fields(tree):
        path, kind = (*parents, one.name), hints[one.name]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from leaves(kind, path)
        else:
            default = None if one.default is MISSING else one.default
            yield Leaf(path, kind, default, str(one.metadata.get("description", "")))


def _beside(kind: Any) -> type | None:
    """Returns the type of values that may stand in place of words: of `Literal["auto"] | int` int."""
    if get_origin(kind) not in (Union, types.UnionType):
        return None
    found = [one for one in get_args(kind) if one is not type(None)]
    return found[1] if len(found) > 1 and get_origin(found[0]) is Literal else None


def _plain(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return _plain(next(one for one in get_args(kind) if one is not type(None)))
    return kind
