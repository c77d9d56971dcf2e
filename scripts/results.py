"""Reads the result files that figures are rendered from."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.result import code_hash, measured_code


class FigureError(Exception):
    """A marker, a result file or a key in it does not exist. The message names the place."""


def flat(found: Any) -> Any:
    """Results in the one form that benches write now (`bench.result`) have their figures at the top as well, where
    older ones have them."""
    if isinstance(found, list):
        return [flat(one) for one in found]
    if isinstance(found, dict) and "code" in found and isinstance(found.get("figures"), dict):
        return {**found["figures"], **found}
    return found


def older(root: Path) -> list[str]:
    """Returns result files without a record of the present code, a line each. A result has a hash of that code; those
    from before there was one, a commit. Changed code need not have changed a figure, so this is a list to look at and
    fails nothing."""
    lines = []
    for path in sorted((root / "bench" / "results").glob("*.json")):
        bench = path.stem.rpartition("-")[0].replace("-", "_")
        why = [_age(one, bench, root) for one in _records(json.loads(path.read_text("utf-8")))]
        if why and all(why):
            lines.append(f"{path.name}, of {why[-1]}")
    return lines


def nameless(root: Path) -> list[str]:
    """Returns result files that name neither a hash nor a commit, so that what they measured is unknown."""
    return [
        path.name
        for path in sorted((root / "bench" / "results").glob("*.json"))
        if not any(_names(one) for one in _records(json.loads(path.read_text("utf-8"))))
        and path.stem not in _OTHERS_CODE
    ]


_COMMITS = ("revision", "sha", "git", "commit", "lookups_sha")
# Measured on other people's code alone, or before results named a commit.
_OTHERS_CODE = ("attention-h100", "kernels-h100-history", "peers-h100", "streams-h100")


def _records(found: Any) -> list[dict[str, Any]]:
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]


def _names(one: Mapping[str, Any]) -> str:
    found = one.get("code") or next((one[key] for key in _COMMITS if one.get(key)), "")
    return str(found or one.get("revisions") or "")


def _age(one: Mapping[str, Any], bench: str, root: Path) -> str:
    """Returns an empty text where the code is unchanged, or where git does not know."""
    if "code" in one:
        return "" if one["code"] == code_hash(str(one.get("bench", bench)), root) else f"code {one['code']}"
    commit = next((str(one[key]) for key in _COMMITS if one.get(key)), "").removesuffix("-dirty")
    return f"commit {commit}" if commit and _changed(commit, bench, root) else ""


@functools.cache
def _changed(commit: str, bench: str, root: Path) -> bool:
    words = ["git", "diff", "--quiet", commit, "--", *measured_code(bench)]
    return subprocess.run(words, cwd=root, capture_output=True).returncode == 1


class Results:
    """Parses each file of bench/results when a renderer first needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parsed:
            path = self._folder / f"{name}.json"
            try:
                self._parsed[name] = flat(json.loads(path.read_text("utf-8")))
            except OSError:
                raise FigureError(f"{path.name} is not in {self._folder}") from None
            except ValueError as error:
                raise FigureError(f"{path.name}: {error}") from None
        return self._parsed[name]


Renderer = Callable[[Results], str]
