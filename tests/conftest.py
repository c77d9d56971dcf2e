"""Fixtures and settings that all tests share.

Tiers are in tests/tiers.py, the number of a property test's examples in tests/properties.py. torch has one thread: the
models are so small that a second costs more than it gives. A test marked `gpu` is skipped where there is no GPU.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.redis_server import RedisServer, free_port, write_keys
from tests.properties import load_profile
from tests.tiers import (
    pytest_addoption,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_runtest_protocol,
)
from tests.virtual_time import pytest_asyncio_loop_factories

__all__ = [
    "pytest_addoption",
    "pytest_asyncio_loop_factories",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_protocol",
]

if TYPE_CHECKING:
    from cache.semantic.embedder import ModelEmbedder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background; servers would not hear it either
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported

load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Gives each run a folder of its own for temporary ones. In the folder that pytest shares among runs of a user, one
    that tidies up takes what another lists, which then fails a test that happens to run. `--basetemp` keeps files."""
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        own = tempfile.mkdtemp(prefix="whippet-")
        config.option.basetemp = f"{own}/run"
        config.add_cleanup(partial(shutil.rmtree, own, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if (marker := item.get_closest_marker("gpu")) is None:
        return
    import torch  # seconds that other tests need not pay

    needed = marker.args[0] if marker.args else 1
    if torch.cuda.device_count() < needed or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device" if needed == 1 else f"needs {needed} CUDA devices")


@pytest.fixture(params=[False, True], ids=["without bf16", "with bf16"])
def bf16_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU without units for bfloat16, and one with them, as this process sees it; torch computes the same on both."""
    from engine.worker import build, hardware

    claimed: bool = request.param
    here = hardware.CpuFeatures(frozenset({"avx512_bf16"} if claimed else ()))
    for module in (build, hardware):
        monkeypatch.setattr(module, "cpu_features", lambda: here)
    return claimed


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """Empty, and this test's alone; it has to stay as it is."""
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers that a test may ruin; `started=False` keeps a port for later."""
    servers: list[RedisServer] = []

    def make(*arguments: str, port: int | None = None, started: bool = True) -> RedisServer:
        server = RedisServer(tmp_path, port or free_port(), arguments)
        servers.append(server)
        return server.start() if started else server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys")


@pytest.fixture(scope="session")
def exported_embedder() -> Path:
    """The folder of the real embedder. Made once a machine, in the user's cache folder, where servers look for it too:
    one process makes it, all others wait for that one."""
    from cache.semantic.export import cache_folder, exported

    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return exported()


@pytest.fixture(scope="session")
def embedder(exported_embedder: Path) -> ModelEmbedder:
    from cache.semantic.embedder import open_embedder

    return open_embedder(exported_embedder)
