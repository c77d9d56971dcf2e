"""The result files that figures are rendered from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FigureError(Exception):
    """A marker, a result file or a key in it that does not exist. The message says where."""


class Results:
    """bench/results, each file parsed when a renderer first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parsed:
            path = self._folder / f"{name}.json"
            try:
                self._parsed[name] = json.loads(path.read_text("utf-8"))
            except OSError:
                raise FigureError(f"{path.name} is not in {self._folder}") from None
            except ValueError as error:
                raise FigureError(f"{path.name}: {error}") from None
        return self._parsed[name]


Renderer = Callable[[Results], str]
