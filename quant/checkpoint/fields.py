"""Typed reading of a model folder's JSON files, with errors that name file, key and remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, NoReturn

from quant.checkpoint.errors import BadFile, short
from quant.checkpoint.regular import open_regular

MAX_JSON_BYTES: Final = 4 << 20  # of a file that describes a model; parsed, it takes ten times as much
MAX_INDEX_BYTES: Final = 32 << 20  # that of a very large model has a few MiB
MAX_SIZE: Final = 1 << 31  # no size in a config is larger


def read_json(path: Path, remedy: str, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads the object in `path`, a regular file of at most `most` bytes. Raises BadFile where there is none."""
    try:
        with open_regular(path) as opened:
            text = opened.read(most + 1)
        if len(text) > most:
            raise BadFile(path, f"larger than {most} bytes", "this is not a model's JSON file")
        parsed = json.loads(text)
    except FileNotFoundError:
        raise BadFile(path, "no such file", remedy) from None
    except OSError as error:
        raise BadFile(path, f"cannot be read ({error.strerror})", remedy) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(path, f"not valid JSON ({_first_line(error)})", "download the file again") from error
    if not isinstance(parsed, dict):
        raise BadFile(path, "holds no JSON object", "download the file again")
    return parsed


class Fields:
    """Reads one JSON object key by key. null counts as absent unless a method accepts it."""

    def __init__(self, raw: dict[str, Any], file: str, prefix: str = "") -> None:
        self.raw = raw
        self.file = file
        self._prefix = prefix

    def refuse(self, key: str, fault: str, remedy: str) -> NoReturn:
        raise BadFile(self.file, f"{self._prefix}{key}: {fault}", remedy)

    def integer(self, key: str, *, default: int | None = None, minimum: int = 0, maximum: int = MAX_SIZE) -> int:
        """A whole number in [minimum, maximum]; required where there is no default."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                self.refuse(key, "is missing", "mend the config")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(
                key, f"must be a whole number from {minimum} to {maximum}, not {short(value)}", "mend the config"
            )
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number; required where there is no default."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                self.refuse(key, "is missing", "mend the config")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            self.refuse(key, f"must be a finite number, not {short(value)}", "mend the config")
        return float(value)

    def within(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A number above `low` and not above `high`; required where there is no default."""
        value = self.number(key, default=default)
        if not low < value <= high:
            self.refuse(key, f"must be above {low:g} and at most {high:g}, not {value:g}", "mend the config")
        return value

    def optional(self, key: str, low: float, high: float) -> float | None:
        """A number within these bounds, or None where there is none."""
        return None if self.raw.get(key) is None else self.within(key, low, high)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, f"must be true or false, not {short(value)}", "mend the config")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested object; None where absent, null or empty."""
        value = self.raw.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "must be an object", "mend the config")
        return Fields(value, self.file, f"{self._prefix}{key}.")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
