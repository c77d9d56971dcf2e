"""A model whose ranks are two groups of processes that share nothing but a network: what the first one starts, and what
`whippet rank` starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from bench.redis_server import free_port
from engine.errors import EngineFailed, Unsupported
from engine.execution.runner import ModelRunner
from engine.settings import EngineSettings
from engine.worker.build import build, make_runner, prepare
from engine.worker.ranks import Ranks
from tests.engine.conftest import Drive, Request
from tests.engine.quantized import make, nothing, settings
from tests.engine.worker.test_mirror import asked, same
from tests.engine.worker.test_ranks import compare
from tests.waiting import reaped, wait_for

pytestmark = pytest.mark.product

PATIENCE = 120.0  # seconds
ROOT = Path(__file__).resolve().parents[3]


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(one) for task in tasks for one in (task / "children").read_text().split()]
    return []


@dataclass
class OtherHost:
    """`whippet rank` for a first rank, and what it writes."""

    folder: Path
    count: int = 1
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        (self.folder / "secret").write_text("x" * 32)
        self.log = self.folder / "rank.log"

    def settings(self, model: Path, **chosen: object) -> EngineSettings:
        given = {"ranks_elsewhere": self.count, "ranks_listen": f"127.0.0.1:{self.port}"}
        return settings(model, **given, ranks_secret_file=str(self.folder / "secret"), **chosen)

    @contextlib.contextmanager
    def started(self, cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "service.cli", "rank", f"--leader=127.0.0.1:{self.port}"]
        given = [f"--secret-file={self.folder / 'secret'}", f"--ranks={self.count}"]
        with self.log.open("ab") as log, subprocess.Popen([*command, *given], cwd=cwd, stderr=log) as process:
            try:
                yield process
            finally:
                process.terminate()
                assert process.wait(PATIENCE) == 0

    def wrote(self, words: str) -> bool:
        return words in self.log.read_text()


@pytest.fixture
def host(tmp_path: Path) -> OtherHost:
    return OtherHost(tmp_path)


@pytest.mark.proof
def test_two_ranks_on_each_of_two_hosts_have_the_ids_of_one_process(
    host: OtherHost, drive: Drive, request_of: Request
) -> None:
    """Two of four ranks are here: some find each other over a socket of this host, and some over the network. The other
    host joins anew with each engine, and leaves none behind."""
    make(host.folder, "qwen3", vocab_size=101, kv_heads=4)
    chosen = OtherHost(host.folder, 2)
    with chosen.started() as process:
        for _ in range(2):
            four = build(chosen.settings(host.folder / "plain", max_sequences=4, tensor_parallel=4), nothing)
            compare(host.folder / "plain", four, drive, request_of)
            ranks = children(process.pid)
            assert len(ranks) == 2
            four.close()
            for rank in ranks:
                wait_for(partial(reaped, rank))
    assert children(process.pid) == []


@dataclass
class Group:
    ranks: Ranks
    runner: ModelRunner
    lost: threading.Event
    ended_by: list[int]


@contextlib.contextmanager
def group_of(host: OtherHost, **chosen: object) -> Iterator[Group]:
    lost, ended_by = threading.Event(), list[int]()

    def note(number: int) -> None:
        ended_by.append(number)
        lost.set()

    make(host.folder, "qwen3", vocab_size=101)
    given = host.settings(host.folder / "plain", max_sequences=4, **chosen)
    ranks = Ranks(given, 2, note)
    runner = make_runner(given, prepare(given, nothing, member=ranks), nothing)
    try:
        yield Group(ranks, runner, lost, ended_by)
    finally:
        runner.close()
        ranks.close()


def test_ranks_of_two_hosts_have_the_ids_of_one_process_and_one_that_is_killed_is_noticed(
    host: OtherHost, drive: Drive, request_of: Request
) -> None:
    """It counts as killed, so that no request is suspected."""
    with host.started() as process, group_of(host) as group:
        compare(host.folder / "plain", group.runner, drive, request_of)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        assert group.lost.wait(PATIENCE)
        assert group.ended_by == [signal.SIGKILL]
        wait_for(lambda: host.wrote("(signal 9)"))


@pytest.mark.proof
def test_a_rank_of_another_host_that_hangs_is_noticed_and_killed_there(host: OtherHost) -> None:
    with host.started() as process:
        with group_of(host, hang_timeout=8.0) as group:
            (hung,) = children(process.pid)
            os.kill(hung, signal.SIGSTOP)
            assert group.lost.wait(PATIENCE)
        wait_for(partial(reaped, hung))


@pytest.mark.proof
def test_a_stop_of_the_other_host_ends_the_group(host: OtherHost, drive: Drive, request_of: Request) -> None:
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(host.started())
        group = stack.enter_context(group_of(host))
        same(drive(group.runner, asked(request_of, 101)), drive(group.runner, asked(request_of, 101)))
        (rank,) = children(process.pid)
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert group.lost.wait(PATIENCE)
        wait_for(partial(reaped, rank))


def test_hosts_with_different_weights_are_not_joined(
    host: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One path leads to other files on the other host: their headers and texts are the same, one number is not."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make(tmp_path / name, "qwen3", vocab_size=101)
    file = tmp_path / "two" / "plain" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    monkeypatch.chdir(tmp_path / "one")
    with host.started(tmp_path / "two"), pytest.raises(EngineFailed, match=r"the ranks differ: .*weights with digest"):
        build(host.settings(Path("plain"), tensor_parallel=2), nothing)


def test_ranks_that_cannot_be_awaited_are_a_refusal(host: OtherHost) -> None:
    make(host.folder, "qwen3")
    chosen = host.settings(host.folder / "plain", tensor_parallel=2)
    with (
        socket.create_server(("127.0.0.1", host.port)),
        pytest.raises(Unsupported, match=r"cannot be awaited: .*in use"),
    ):
        build(chosen, nothing)
    (host.folder / "secret").write_text("short")
    with pytest.raises(Unsupported, match="at least 16 bytes"):
        build(chosen, nothing)
