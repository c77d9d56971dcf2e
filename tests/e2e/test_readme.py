"""The call that README shows works as it stands there, but for the port."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.product

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r"<!-- readme-call -->\s*```sh\n(.*?)```", re.DOTALL)


def test_the_call_streams(demo: object, grpcurl: Path) -> None:
    found = CALL.findall((ROOT / "README.md").read_text())
    assert len(found) == 1
    command = found[0].replace("127.0.0.1:50051", demo.data)  # type: ignore[attr-defined]
    assert command != found[0]
    assert command.startswith("grpcurl ")
    done = subprocess.run(
        ["sh", "-c", str(grpcurl) + command.removeprefix("grpcurl")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n{") + 1 > 10
    assert re.search(r'"reason": "FINISH_REASON_', done.stdout)
    assert re.search(r'"completion_?[tT]okens": [1-9]', done.stdout)
