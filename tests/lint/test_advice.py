"""Nobody is told to install a package by a name that is not registered: whoever registered it would be installed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("service", "engine", "cache", "quant", "bench", "docs", "helm", "examples", "README.md", "CONTRIBUTING.md")
READ = {".py", ".md", ".yaml", ".txt", ".tpl"}


def test_no_advice_names_the_distribution() -> None:
    files = [path for place in PLACES for path in [ROOT / place, *(ROOT / place).rglob("*")] if path.suffix in READ]
    assert len(files) > 300
    assert [path for path in files if "install 'whippet-serve" in path.read_text("utf-8")] == []
    assert [path for path in files if "install whippet-serve" in path.read_text("utf-8")] == []
