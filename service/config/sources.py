"""Loads settings: flags beat the environment (`WHIPPET_…`, nested by `__`), which beats the YAML that `--config` names,
which beats the defaults. Unknown names are refused, wherever they stand."""

from __future__ import annotations

import argparse
import enum
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from service.config.leaves import PLAIN_WORDS, Leaf, leaves, spelled
from service.config.settings import BadSettings, Settings

ENV_PREFIX = "WHIPPET_"
_DESCRIPTION = (
    "Serves a model over gRPC, until SIGTERM or ctrl-C. Every flag is an environment variable as well "
    "(--scheduler.max-sequences: WHIPPET_SCHEDULER__MAX_SEQUENCES) and a key of the YAML that --config names; a flag "
    "counts before the variable, that before the file."
)
_EXIT_CODES = (
    "Exit code: 0 stopped by a signal, every request had ended; 1 requests were cut off, or something broke; 2 a "
    "setting is wrong; 3 the model cannot be served; 4 a port is taken."
)
_MOST_BYTES = 1 << 20  # of the file
# What Kubernetes injects for a Service whose name is whippet or begins with `whippet-`, as NAME=VALUE.
_KUBERNETES = re.compile(
    r"WHIPPET(_[A-Z0-9_]+)?_("
    r"SERVICE_HOST=[0-9a-fA-F.:]+"
    r"|SERVICE_PORT(_[A-Z0-9_]+)?=\d+"
    r"|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://\S+"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR=[0-9a-fA-F.:]+)"
    r")"
)
_PLAIN_WORD = {leaf: group for group, leaf in PLAIN_WORDS.items()}


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Raises BadSettings; `--help` prints and raises SystemExit(0)."""
    env = os.environ if environ is None else environ
    flags = _flags(argv)
    config = flags.get("config") or env.get(f"{ENV_PREFIX}CONFIG")
    tree: dict[str, Any] = {}
    for file in () if config is None else config_files(Path(config)):
        _merge(tree, _yaml(file))
    _merge(tree, _environment(env))
    _merge(tree, flags)
    try:
        return Settings(**tree)
    except ValidationError as error:
        raise BadSettings("; ".join(_sentence(e) for e in error.errors(include_url=False))) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadSettings(message)


def _flags(argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(
        prog="whippet serve",
        usage="whippet serve --model MODEL [--config YAML] [--FLAG VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    groups: dict[tuple[str, ...], Any] = {(): parser}
    known = tuple(leaves(Settings))
    for leaf in known:
        group = _PLAIN_WORD.get(leaf.path, leaf.path)[:-1]
        if group not in groups:
            groups[group] = parser.add_argument_group(f"{spelled(group)} options")
        _add_flag(groups[group], leaf)
    given = vars(parser.parse_args(list(argv)))
    tree: dict[str, Any] = {}
    for leaf in known:
        if leaf.name in given:
            value = given[leaf.name]
            _put(tree, leaf.path, None if value == "None" and leaf.default is None else value)
    return tree


def _add_flag(group: Any, leaf: Leaf) -> None:
    """`--engine` has `--engine.kind` as its long form, which `--help` does not repeat. A switch without a value is
    turned on."""
    name = spelled(_PLAIN_WORD.get(leaf.path, leaf.path))
    text = f"{leaf.help}{_default(leaf.default)}".strip().replace("%", "%%")
    alone: dict[str, Any] = {"nargs": "?", "const": True} if isinstance(leaf.default, bool) else {}
    unset = argparse.SUPPRESS
    group.add_argument(f"--{name}", dest=leaf.name, metavar=leaf.values, default=unset, help=text, **alone)
    if name != leaf.name:
        group.add_argument(f"--{leaf.name}", dest=leaf.name, default=unset, help=argparse.SUPPRESS, **alone)


def _default(value: object) -> str:
    """Empty where the help states what unset means, or the default is off."""
    if value is None:
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, float):
        value = f"{value:g}"
    return f" (default: {value.value if isinstance(value, enum.Enum) else value})"


def _environment(env: Mapping[str, str]) -> dict[str, Any]:
    known = {leaf.path for leaf in leaves(Settings)}
    tree: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in sorted(env.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        path = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        path = PLAIN_WORDS.get(path, path)
        if path in known:
            _put(tree, path, value)
        elif not _KUBERNETES.fullmatch(f"{name}={value}"):
            unknown.append(name)
    if unknown:
        raise BadSettings(f"{', '.join(unknown)}: there is no such setting")
    return tree


def config_files(path: Path) -> tuple[Path, ...]:
    """The file, or the YAML files of a folder: where two set the same, the later name counts. Raises BadSettings."""
    try:
        files = tuple(sorted(path.glob("*.yaml"))) if path.is_dir() else (path,)
    except OSError as error:
        raise BadSettings(f"config: {path} cannot be read: {error}") from None
    if not files:
        raise BadSettings(f"config: {path} holds no *.yaml")
    return files


def _yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"config: {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise BadSettings(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise BadSettings(f"config: {path} is not a mapping of setting names")
    plain: dict[str, Any] = _underscored(tree)
    for (group,), leaf in PLAIN_WORDS.items():
        if group in plain and not isinstance(plain[group], dict):
            plain[group] = {leaf[-1]: plain[group]}
    return plain


def _text(path: Path) -> str:
    """Reads without waiting for a FIFO's writer. Raises BadSettings, OSError, UnicodeDecodeError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadSettings(f"config: {path} is no file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise BadSettings(f"config: {path} is larger than {_MOST_BYTES >> 20} MiB")
    return data.decode("utf-8")


def _underscored(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key).replace("-", "_"): _underscored(inner) for key, inner in value.items()}
    return value


def _put(tree: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for parent in path[:-1]:
        tree = tree.setdefault(parent, {})
    tree[path[-1]] = value


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _sentence(error: Any) -> str:
    name = spelled(tuple(str(part) for part in error["loc"]))
    for group, leaf in PLAIN_WORDS.items():
        if name == spelled(leaf):
            name = spelled(group)
    match error["type"]:
        case "unexpected_keyword_argument":
            return f"{name}: there is no such setting"
        case "dataclass_type":
            return f"{name}: a group of settings, not one value"
    text = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {text}" if name else text
