"""Formats cells of tables: rounded and joined figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def rounded(value: float, digits: int) -> Decimal:
    """Rounds half away from zero, on the decimal that the result file contains."""
    return Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def whole(value: float | None) -> str:
    return "" if value is None else f"{rounded(value, 0):,}"


def fixed(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{rounded(value, digits):,}"


def percent(share: float, digits: int = 0) -> str:
    return f"{rounded(100 * share, digits)}"


def signed(share: float) -> str:
    """Formats a change in per cent, with its sign unless it rounds to nothing."""
    text = f"{rounded(100 * share, 2):+}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def joined(values: Iterable[str]) -> str:
    """Joins figures that share a cell; trailing empty ones are left out."""
    return " · ".join(value for value in values if value)
