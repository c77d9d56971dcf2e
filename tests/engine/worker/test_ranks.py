"""The processes of a split model: they compute what one process computes, and end as one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineFailed, InvalidModel, Unsupported
from engine.scheduling.plan import PageAccess
from engine.worker.build import build, make_runner, prepare
from engine.worker.ranks import Ranks
from tests.engine.conftest import Drive, Request
from tests.engine.quantized import make, nothing, settings
from tests.engine.worker.test_mirror import asked, same

pytestmark = pytest.mark.product


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("kept", ["plain", pytest.param("awq", marks=pytest.mark.proof)])
def test_two_processes_have_the_ids_of_one(kept: str, tmp_path: Path, drive: Drive, request_of: Request) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    requests = asked(request_of, 101)
    one = build(settings(tmp_path / kept, max_sequences=4), nothing)
    expected = drive(one, requests)
    two = build(settings(tmp_path / kept, max_sequences=4, tensor_parallel=2), nothing)
    same(expected, drive(two, requests))
    assert two.info.weights_digest == one.info.weights_digest
    assert two.pages.layout == one.pages.layout
    same_pages(one.pages, two.pages)
    one.close()
    two.close()


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


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_noticed_without_any_work(sent: signal.Signals, tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    lost, ended_by = threading.Event(), list[int]()

    def note(number: int) -> None:
        ended_by.append(number)
        lost.set()

    chosen = settings(tmp_path / "plain", hang_timeout=8.0)
    ranks = Ranks(chosen, 2, note)
    prepare(chosen, nothing, member=ranks)
    os.kill(ranks.pids[0], sent)
    assert lost.wait(120)
    assert ended_by == [sent if sent == signal.SIGKILL else 0]
    ranks.close()
    assert gone(ranks.pids[0])


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
    tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    before = listening(os.getpid())
    chosen = settings(tmp_path / "plain", max_sequences=4)
    ranks = Ranks(chosen, 2)
    runner = make_runner(chosen, prepare(chosen, nothing, member=ranks), nothing)
    doors = [one for pid in (os.getpid(), *ranks.pids) for one in listening(pid) if one not in before]
    assert doors
    assert {address for address, _ in doors} == {"0100007F"}
    expected = drive(runner, asked(request_of, 101))
    for content in (b"", bytes(8), b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(range(256)) * 64):
        for _, port in doors:
            with socket.create_connection(("127.0.0.1", port), 10) as stranger, contextlib.suppress(OSError):
                stranger.sendall(content)
        same(expected, drive(runner, asked(request_of, 101)))
    runner.close()
