"""When commands are obeyed, by a front at the other end of a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from engine.fake import plain_request
from engine.ipc.frames import Cancel, Command, Pause, Submit
from engine.ipc.framing import FrameError, encode
from engine.ipc.link import EngineLink
from engine.worker.arrivals import Arrivals


def submit(key: int, tokens: int = 1) -> Submit:
    return Submit(key, plain_request((1,) * tokens))


class Front:
    """Sends commands, and says which were obeyed."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.socket = ours
        self.obeyed: list[Command] = []
        self.arrivals = Arrivals(EngineLink(theirs), self.obeyed.append)

    def send(self, *commands: Command) -> None:
        self.socket.sendall(b"".join(map(encode, commands)))

    @property
    def keys(self) -> list[int]:
        return [command.key for command in self.obeyed if isinstance(command, Submit)]


@pytest.fixture
def front() -> Iterator[Front]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Front(ours, theirs)


def test_between_steps_all_is_obeyed(front: Front) -> None:
    front.send(submit(1), Cancel(1), submit(2, tokens=2000), Pause(2))
    front.arrivals.take(None)
    assert [type(command) for command in front.obeyed] == [Submit, Cancel, Submit, Pause]
    front.arrivals.take(0)
    assert len(front.obeyed) == 4


def test_during_a_step_short_requests_are_obeyed_one_by_one(front: Front) -> None:
    front.send(submit(1), submit(2, tokens=1024), submit(3, tokens=1025), submit(4))
    assert [front.arrivals.take_early() for _ in range(4)] == [True, True, False, False]
    assert front.keys == [1, 2]
    front.arrivals.take(None)
    assert front.keys == [1, 2, 3, 4]


def test_during_a_step_all_else_waits_in_its_order(front: Front) -> None:
    front.send(Pause(1), submit(2), Cancel(2))
    assert not front.arrivals.take_early()
    assert not front.arrivals.take_early()
    front.send(submit(3))
    front.arrivals.take(0)
    assert [type(command) for command in front.obeyed] == [Pause, Submit, Cancel, Submit]


@pytest.mark.parametrize(("last", "kind"), [(b"", EOFError), (b"\x00\x00\x00\x01\xc1", FrameError)])
def test_how_a_link_ends_during_a_step_is_said_behind_it(front: Front, last: bytes, kind: type[Exception]) -> None:
    front.send(submit(1))
    assert front.arrivals.take_early()
    front.socket.sendall(last)
    front.socket.shutdown(socket.SHUT_WR)
    assert [front.arrivals.take_early() for _ in range(2)] == [False, False]
    for _ in range(2):
        with pytest.raises(kind):
            front.arrivals.take(0)
    assert front.keys == [1]
