"""Every setting, changed by its flag, changes what it says: not one of them may be without a proof."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench.redis_server import RedisServer
from service.config.leaves import leaves
from service.config.settings import Settings
from tests.service.config import (
    bounds_proofs,
    cache_proofs,
    chat_proofs,
    engine_proofs,
    front_proofs,
    semantic_proofs,
    trace_proofs,
)
from tests.service.config.proofs import Proof, Tools
from tests.service.conftest import Server

pytestmark = pytest.mark.proof

Serve = Callable[..., AbstractContextManager[Server]]
PROOFS: dict[str, Proof] = {
    **engine_proofs.PROOFS,
    **cache_proofs.PROOFS,
    **semantic_proofs.PROOFS,
    **front_proofs.PROOFS,
    **chat_proofs.PROOFS,
    **trace_proofs.PROOFS,
    **bounds_proofs.PROOFS,
}
LEAVES = [leaf.name for leaf in leaves(Settings)]


@pytest.fixture
def tools(tmp_path: Path, redis_server: RedisServer, key_file: Path, serve: Serve) -> Tools:
    (tmp_path / "c.yaml").write_text("model_name: from-file\n")
    return Tools(tmp_path, redis_server, key_file, serve)


def test_no_proof_is_of_a_setting_that_is_gone() -> None:
    assert set(PROOFS) <= set(LEAVES)


@pytest.mark.parametrize("leaf", LEAVES)
async def test_a_setting_changes_what_it_says(leaf: str, tools: Tools) -> None:
    assert leaf in PROOFS, f"{leaf} has no proof that it does anything: add one to tests/service/config/*_proofs.py"
    await PROOFS[leaf].holds(leaf, tools)
