"""The processes of a split model: they compute what one process computes, and end as one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineFailed, InvalidModel, Unsupported
from engine.execution.runner import ModelRunner
from engine.scheduling.plan import PageAccess
from engine.worker.build import build, make_runner, prepare
from engine.worker.ranks import Ranks
from tests.engine.conftest import Drive, Request
from tests.engine.quantized import make, nothing, settings
from tests.engine.worker.test_mirror import asked, same
from tests.waiting import reaped

pytestmark = pytest.mark.product


@dataclass
class Group:
    """A model in this process and one more, and how the other one was lost."""

    folder: Path
    ranks: Ranks
    runner: ModelRunner
    known: list[tuple[str, int]]  # what this process listened on before
    lost: threading.Event = field(default_factory=threading.Event)
    ended_by: list[int] = field(default_factory=list)

    def note(self, number: int) -> None:
        self.ended_by.append(number)
        self.lost.set()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One for all tests that leave it as it is, and for one that ends it, which stands last."""
    root = tmp_path_factory.mktemp("split")
    make(root, "qwen3", vocab_size=101)
    known, notes = listening(os.getpid()), list[Callable[[int], None]]()
    chosen = settings(root / "plain", max_sequences=4)
    ranks = Ranks(chosen, 2, lambda number: notes[0](number))
    made = Group(root / "plain", ranks, make_runner(chosen, prepare(chosen, nothing, member=ranks), nothing), known)
    notes.append(made.note)
    yield made
    made.runner.close()
    made.ranks.close()


def test_two_processes_have_the_ids_of_one(group: Group, drive: Drive, request_of: Request) -> None:
    compare(group.folder, group.runner, drive, request_of)


@pytest.mark.proof
def test_two_processes_have_the_ids_of_one_in_four_bits(tmp_path: Path, drive: Drive, request_of: Request) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    two = build(settings(tmp_path / "awq", max_sequences=4, tensor_parallel=2), nothing)
    compare(tmp_path / "awq", two, drive, request_of)
    two.close()


def compare(folder: Path, two: ModelRunner, drive: Drive, request_of: Request) -> None:
    requests = asked(request_of, 101)
    one = build(settings(folder, max_sequences=4), nothing)
    same(drive(one, requests), drive(two, requests))
    assert two.info.weights_digest == one.info.weights_digest
    assert two.pages.layout == one.pages.layout
    same_pages(one.pages, two.pages)
    one.close()


def same_pages(one: PageAccess, two: PageAccess) -> None:
    """Pages of either go into the other."""
    size = 16 * one.layout.token_bytes
    content = os.urandom(2 * size)
    two.write([3, 1], memoryview(bytearray(content)))
    found = two.buffer(2 * size)
    two.read([3, 1], found)
    assert bytes(found) == content
    one.write([1], found[size:])
    again = one.buffer(size)
    one.read([1], again)
    assert bytes(again) == content[size:]


def test_a_model_that_cannot_be_split_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    with pytest.raises(Unsupported, match="its 4 heads cannot be divided among 3"):
        build(settings(tmp_path / "plain", tensor_parallel=3), nothing)
    wide = tmp_path / "wide"
    wide.mkdir()
    make(wide, "qwen3", group=64)
    with pytest.raises(Unsupported, match="o_proj has 32 inputs a rank, and groups of 64"):
        build(settings(wide / "awq", tensor_parallel=4), nothing)


def test_damage_in_the_part_of_another_rank_is_a_refusal(tmp_path: Path) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    file = tmp_path / "plain" / "model.safetensors"
    held = load_file(file)
    held["model.embed_tokens.weight"][100, 3] = torch.nan
    save_file(held, file)
    with pytest.raises(InvalidModel, match="embed_tokens"):
        build(settings(tmp_path / "plain", tensor_parallel=2), nothing)


def test_a_rank_that_dies_while_it_loads_fails_the_load(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    ranks = Ranks(settings(tmp_path / "plain"), 2)
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"rank 1 ended while it loaded \(signal 9\)"):
        ranks.meet(nothing)
    ranks.close()


def test_a_rank_that_hangs_is_noticed_without_any_work(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    lost, ended_by = threading.Event(), list[int]()

    def note(number: int) -> None:
        ended_by.append(number)
        lost.set()

    chosen = settings(tmp_path / "plain", hang_timeout=8.0)
    ranks = Ranks(chosen, 2, note)
    prepare(chosen, nothing, member=ranks)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    assert lost.wait(120)
    assert ended_by == [0]
    ranks.close()
    assert reaped(ranks.pids[0])


def listening(pid: int) -> list[tuple[str, int]]:
    """Returns address, as the kernel writes it, and port of each socket on which a process listens."""
    held = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                address, _, port = fields[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def test_ranks_listen_on_the_loopback_interface_alone_and_strangers_do_not_disturb_them(
    group: Group, drive: Drive, request_of: Request
) -> None:
    pids = (os.getpid(), *group.ranks.pids)
    doors = [one for pid in pids for one in listening(pid) if one not in group.known]
    assert doors
    assert {address for address, _ in doors} == {"0100007F"}
    expected = drive(group.runner, asked(request_of, 101))
    for content in (b"", bytes(8), b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(range(256)) * 64):
        for _, port in doors:
            with socket.create_connection(("127.0.0.1", port), 10) as stranger, contextlib.suppress(OSError):
                stranger.sendall(content)
        same(expected, drive(group.runner, asked(request_of, 101)))


def test_a_rank_that_dies_is_noticed_without_any_work(group: Group) -> None:
    os.kill(group.ranks.pids[0], signal.SIGKILL)
    assert group.lost.wait(120)
    assert group.ended_by == [signal.SIGKILL]
    group.ranks.close()
    assert reaped(group.ranks.pids[0])


def test_who_finds_a_lost_group_second_waits_for_its_end(tmp_path: Path) -> None:
    """Else a step that failed with the group could be reported before the process ends."""
    ending, may_end, second_returned = threading.Event(), threading.Event(), threading.Event()
    ended_by: list[int] = []

    def end(number: int) -> None:
        ended_by.append(number)
        ending.set()
        assert may_end.wait(60)

    ranks = Ranks(settings(tmp_path), 1, end)
    first = threading.Thread(target=ranks.lost, args=("one",))
    first.start()
    assert ending.wait(60)

    def find_second() -> None:
        ranks.lost("two")
        second_returned.set()

    second = threading.Thread(target=find_second)
    second.start()
    assert not second_returned.wait(0.1)
    may_end.set()
    first.join(60)
    second.join(60)
    assert second_returned.is_set()
    assert ended_by == [0]
    ranks.close()
