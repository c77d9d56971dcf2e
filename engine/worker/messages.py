"""What the processes of a split model say to each other: the first rank, which is the engine process, sends orders to
each of the others over a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from engine.execution.pipeline import MorePages
from engine.execution.router import StepOptions
from engine.ipc import joining
from engine.ipc.framing import FrameReader, encode
from engine.scheduling.plan import Share, StepPlan
from engine.settings import EngineSettings

_CHUNK: Final = 1 << 20  # bytes
_Message = Any


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message to a rank: what to load, and which part of it."""

    settings: EngineSettings
    rank: int
    ranks: int
    on_gpus: bool


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All ranks have loaded: they connect to each other now, in this folder of their host; None: by keys that the first
    rank holds."""

    folder: str | None
    address: str  # of the first rank's host, for those on it


class Forward(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Computes the layers for the tokens of a step."""

    tokens: bytes  # int64 [3, tokens]: ids, positions, slots
    spans: list[tuple[int, int, int, list[int]]]  # as `RowSpan`
    sampled: bytes | None  # int64


class Logits(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Computes this rank's part of the head for `rows` hidden states, which the first rank shares."""

    rows: int


class ReadPages(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Gives the first rank the keys and values of these pages."""

    pages: list[int]


class WritePages(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Takes the rank's heads of keys and values of these pages from the first rank."""

    pages: list[int]


class PingRank(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Asks for `PongRank`, which is sent once all earlier messages have been obeyed."""


class BeginStep(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Applies a plan to the table of sequences, before launches of that step."""

    plan: StepPlan


class AppendTokens(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Appends what a step brought: slot and tokens of each sequence."""

    rows: list[tuple[int, tuple[int, ...]]]


class WrittenRow(NamedTuple):
    """A `RowState`, which the sequence in `slot` completes."""

    slot: int
    position: int
    last_position: int
    unreported: tuple[int, ...]
    most_drafts: int


class WriteRows(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """`Rewrite` of a device for few rows."""

    device: int
    rows: list[WrittenRow]
    number: int


class ExtendRow(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """`MorePages` of a device for few rows."""

    device: int
    pages: MorePages


class EnteredRow(NamedTuple):
    """A `BatchRow`, which the sequence in `slot` completes."""

    slot: int
    at: int  # its index
    first: int
    last: int
    pages: int


class ChangeRows(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """`Changes` of a device for many rows."""

    device: int
    left: tuple[int, ...]
    entered: list[EnteredRow]
    paged: tuple[MorePages, ...]
    moved: tuple[tuple[int, int], ...]


class LaunchSteps(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """`StepLaunch` of a device. `masks`: of a half step that chooses tokens; `layers`: of one that does not."""

    device: int
    longest: int
    steps: int
    group: int
    rows: int
    options: StepOptions
    layers: bool = False
    masks: dict[int, bytes] | None = None


class FeedPrompts(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Computes a share of prompts, in passes of these costs by their sizes."""

    share: Share
    options: StepOptions
    costs: dict[int, float]


class KeyIs(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Gives the rank the value that it asked for by `AskKey`."""

    value: bytes


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Reports that the rank has loaded its part of the weights."""


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Reports that the rank will never be ready with these settings. Its process ends."""

    kind: Literal["invalid_model", "unsupported"]
    message: str


class PongRank(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Reports that the rank obeys orders. Until then it may be silent for long."""


class RankWorking(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Reports that a rank of another host computes, before it is ready."""


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Reports that the process ends because something of its own failed."""


class PutKey(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Leaves a value with the first rank."""

    key: str
    value: bytes


class AskKey(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Asks for a value, which is sent once it is there."""

    key: str


Mirrored = (
    Forward
    | Logits
    | ReadPages
    | WritePages
    | BeginStep
    | AppendTokens
    | WriteRows
    | ExtendRow
    | ChangeRows
    | LaunchSteps
    | FeedPrompts
)
Order = Join | Meet | PingRank | KeyIs | Mirrored  # first rank → others
Reply = (
    RankLoaded | RankRefused | PongRank | RankReady | RankWorking | RankFailed | PutKey | AskKey
)  # others → first rank


class RankLink:
    """One end of the socket between the first rank and another. Sends and receives by blocking; any thread may send,
    one receives."""

    def __init__(self, sock: socket.socket, receives: Any, dec_hook: Callable[[type, Any], Any] | None = None) -> None:
        self._socket = sock
        self._reader: FrameReader[_Message] = FrameReader(msgspec.msgpack.Decoder(receives, dec_hook=dec_hook))
        self._came: list[_Message] = []
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def buffered(self) -> bool:
        """Returns whether `receive` has a message already, of which a poll of the socket knows nothing."""
        return bool(self._came)

    @property
    def address(self) -> str:
        """Returns by which address the other side reaches this host; empty where both are on it."""
        name = self._socket.getsockname()
        return str(name[0]) if isinstance(name, tuple) else ""

    def keep_alive(self, seconds: float) -> None:
        """Makes the kernel end a connection to another host that has been silent for about so long."""
        if self.address:
            joining.keep_alive(self._socket, seconds)

    def send(self, message: msgspec.Struct) -> None:
        """Returns once the kernel has the message. Raises OSError where the other process has gone."""
        data = encode(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> _Message:
        """Waits for a message. Raises EOFError where the other process has gone."""
        while not self._came:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise EOFError
            self._came += self._reader.feed(data)
        return self._came.pop(0)

    def next_order(self) -> _Message:
        """Waits for an order of the first rank, and answers pings until one comes. Raises EOFError where the first rank
        has gone."""
        while isinstance(order := self.receive(), PingRank):
            self.send(PongRank())
        return order

    def send_if_room(self, message: msgspec.Struct) -> None:
        """Sends a short message, unless another one is being sent. Waits only where the kernel took a part of it.
        Raises OSError where the kernel has no room, or the other process has gone."""
        if self._sending.acquire(blocking=False):
            try:
                data = encode(message)
                self._socket.sendall(data[self._socket.send(data, socket.MSG_DONTWAIT) :])
            finally:
                self._sending.release()

    def shut(self) -> None:
        """Ends the stream in both directions, which wakes whoever waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
