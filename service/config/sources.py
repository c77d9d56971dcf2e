"""Where settings come from, and which value wins.

Flags beat the environment (`WHIPPET_…`, nested by `__`), which beats the YAML file named by `--config`, which beats
the defaults of the tree. A name that no setting has is refused, wherever it stands.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import CliSettingsSource

from service.config.group import Group
from service.config.settings import BadSettings, Settings

ENV_PREFIX = "WHIPPET_"
# Kubernetes injects these for a Service that is called whippet; no setting begins like them.
_KUBERNETES = re.compile(r"WHIPPET_(SERVICE_|PORT(_|$))")


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Flags > environment > YAML > defaults. Raises BadSettings; `--help` prints and raises SystemExit(0)."""
    env = os.environ if environ is None else environ
    flags = _flags(argv)
    config = flags.get("config") or env.get(f"{ENV_PREFIX}CONFIG")
    tree: dict[str, Any] = {} if config is None else _yaml(Path(config))
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
    parser = _Parser(prog="whippet serve", description="Serves a model over gRPC.", allow_abbrev=False)
    source: CliSettingsSource[Any] = CliSettingsSource(
        Settings, root_parser=parser, cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True
    )
    given = source(args=list(argv))
    return dict(given())


def _environment(env: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or _KUBERNETES.match(name):
            continue
        path = name.removeprefix(ENV_PREFIX).lower().split("__")
        if tuple(path) not in _PATHS:
            unknown.append(name)
            continue
        at = tree
        for parent in path[:-1]:
            at = at.setdefault(parent, {})
        at[path[-1]] = value
    if unknown:
        raise BadSettings(f"{', '.join(unknown)}: there is no such setting")
    return tree


def _paths(model: type[BaseModel], parents: tuple[str, ...] = ()) -> frozenset[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Group):
            found |= _paths(inner, (*parents, name))
        else:
            found.add((*parents, name))
    return frozenset(found)


_PATHS = _paths(Settings)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"config: {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise BadSettings(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise BadSettings(f"config: {path} is not a mapping of setting names")
    return {key.replace("-", "_"): _plain(value) for key, value in tree.items()}


def _plain(value: Any) -> Any:
    """YAML may write names as flags do, with hyphens."""
    if isinstance(value, dict):
        return {str(key).replace("-", "_"): _plain(inner) for key, inner in value.items()}
    return value


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _sentence(error: Any) -> str:
    name = ".".join(str(part).replace("_", "-") for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    text = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {text}" if name else text
