"""Nothing in the front uses the event loop's own thread pool: what fills it would hold up everybody else who does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def borrowed(source: str) -> list[int]:
    """Lines that use the pool."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        first = call.args[0] if call.args else None
        default = isinstance(first, ast.Constant) and first.value is None
        if name == "to_thread" or (name == "run_in_executor" and default):
            found.append(call.lineno)
    return found


@pytest.mark.parametrize("package", ["service", "engine/client", "engine/ipc", "cache"])
def test_each_has_threads_of_its_own_or_none(package: str) -> None:
    found = {str(path): borrowed(path.read_text()) for path in (ROOT / package).rglob("*.py")}
    assert len(found) > 1
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source", ["asyncio.to_thread(f)", "to_thread(f)", "loop.run_in_executor(None, f)", "x = await_(to_thread(f))"]
)
def test_the_pool_is_seen(source: str) -> None:
    assert borrowed(source)
