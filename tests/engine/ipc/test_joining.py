"""Ranks of other hosts: who knows the secret and runs the same code is let in, and nobody else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.ipc import joining
from engine.ipc.joining import Door, JoinRefused, code_digest, join, keep_alive, read_secret
from service.cli import rank

SECRET, OTHER = b"s" * 32, b"o" * 32
CODE = bytes(32)
PATIENCE = 30.0  # seconds


@pytest.fixture
def door() -> Iterator[Door]:
    with contextlib.closing(Door("127.0.0.1:0", SECRET, CODE)) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def at(door: Door) -> str:
    return f"{door.address[0]}:{door.address[1]}"


def joining_to(
    pool: ThreadPoolExecutor, door: Door, secret: bytes = SECRET, code: bytes = CODE
) -> Future[socket.socket]:
    return pool.submit(join, at(door), secret, code)


def test_who_knows_the_secret_and_runs_the_same_code_is_let_in(door: Door, pool: ThreadPoolExecutor) -> None:
    theirs = joining_to(pool, door)
    ours = door.accept(PATIENCE)
    assert ours is not None
    with ours, theirs.result(PATIENCE) as other:
        for sock in (ours, other):
            keep_alive(sock, 10.0)
            assert sock.gettimeout() is None
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        ours.sendall(b"order")
        other.sendall(b"reply")
        assert (other.recv(5, socket.MSG_WAITALL), ours.recv(5, socket.MSG_WAITALL)) == (b"order", b"reply")


def test_who_knows_another_secret_is_turned_away(door: Door, pool: ThreadPoolExecutor) -> None:
    theirs = joining_to(pool, door, OTHER)
    with pytest.raises(JoinRefused, match="another secret"):
        door.accept(PATIENCE)
    with pytest.raises(JoinRefused, match="has another secret"):
        theirs.result(PATIENCE)


def test_both_sides_name_another_version(door: Door, pool: ThreadPoolExecutor) -> None:
    theirs = joining_to(pool, door, code=b"v" * 32)
    with pytest.raises(JoinRefused, match="another version"):
        door.accept(PATIENCE)
    with pytest.raises(JoinRefused, match="another version"):
        theirs.result(PATIENCE)


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(96), bytes(range(256)) * 64])
def test_strangers_do_not_keep_ranks_out(door: Door, pool: ThreadPoolExecutor, content: bytes) -> None:
    with socket.create_connection(door.address, PATIENCE) as stranger:
        stranger.sendall(content)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(JoinRefused):
            door.accept(PATIENCE)
    theirs = joining_to(pool, door)
    ours = door.accept(PATIENCE)
    assert ours is not None
    ours.close()
    theirs.result(PATIENCE).close()


def test_a_silent_stranger_has_little_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_PATIENCE", 0.05)
    with socket.create_connection(door.address, PATIENCE), pytest.raises(JoinRefused, match="prove itself"):
        door.accept(PATIENCE)


def test_nobody_came(door: Door) -> None:
    assert door.accept(0.01) is None


@pytest.mark.parametrize("answer", [bytes(33), b"\1" + bytes(32), b"\0" + bytes(32)])
def test_a_first_rank_that_does_not_know_the_secret_gets_no_rank(pool: ThreadPoolExecutor, answer: bytes) -> None:
    """Nor does it learn what it could show to the true one: proofs are of both sides' random numbers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = pool.submit(join, f"127.0.0.1:{server.getsockname()[1]}", SECRET, CODE)
        sock, _ = server.accept()
        with sock:
            sock.sendall(joining._GREETING + bytes(32))
            shown = sock.recv(96, socket.MSG_WAITALL)
            sock.sendall(answer)
            with pytest.raises(JoinRefused, match="does not know the secret"):
                theirs.result(PATIENCE)
    with contextlib.closing(Door("127.0.0.1:0", SECRET, CODE)) as true, socket.create_connection(true.address) as sock:
        sock.sendall(shown)
        with pytest.raises(JoinRefused, match="another secret"):
            true.accept(PATIENCE)


def test_what_is_no_first_rank_is_named(pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = pool.submit(join, f"127.0.0.1:{server.getsockname()[1]}", SECRET, CODE)
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
            with pytest.raises(JoinRefused, match="no first rank"):
                theirs.result(PATIENCE)


def test_a_first_rank_that_does_not_listen_yet_is_no_refusal(door: Door) -> None:
    door.close()
    with pytest.raises(OSError, match="refused"):
        join(at(door), SECRET, CODE)


@pytest.mark.parametrize("flags", [["--leader=:5"], ["--leader=host"], ["--leader=h:5", "--ranks=0"]])
def test_flags_that_make_no_sense_are_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("x" * 32)
    with contextlib.suppress(SystemExit):
        assert rank.run([*flags, f"--secret-file={tmp_path / 'secret'}"]) == 2
    assert "write " in capsys.readouterr().err


def test_a_short_secret_is_none(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short\n")
    with pytest.raises(JoinRefused, match="at least 16 bytes"):
        read_secret(file)
    file.write_text("long enough to be one\n")
    assert read_secret(file) == b"long enough to be one"


def test_the_digest_covers_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_digest() == code_digest()
    module = tmp_path / "engine" / "ipc" / "joining.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(joining, "__file__", str(module))
    module.write_text("one")
    before = code_digest()
    module.write_text("two")
    assert code_digest() != before
