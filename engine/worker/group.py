"""What the processes of a split model say to each other, and the tensors that they exchange.

The first rank, which is the engine process, sends orders to each of the others over a socket. Tensors go over gloo,
which listens on the loopback interface alone and meets in a file of a folder that only the owner may enter.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import torch
from torch import distributed

from engine.execution.pipeline import MorePages
from engine.execution.router import StepOptions
from engine.ipc.framing import FrameReader, encode
from engine.kernels.build import Kernels
from engine.kernels.exchange import Channels, exchange_sum, sums_by_kernel
from engine.kernels.launch import launcher_of
from engine.model.split import Part
from engine.scheduling.plan import Share, StepPlan
from engine.settings import EngineSettings

_LOOPBACK: Final = "127.0.0.1"
_NCCL: Final = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}  # no open port, no NVLink multicast
_CHUNK: Final = 1 << 20  # bytes
_Message = Any


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message to a rank: what to load, and which part of it."""

    settings: EngineSettings
    rank: int
    ranks: int
    on_gpus: bool


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All ranks have loaded: they connect to each other now, in this folder."""

    folder: str


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


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pass


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Reports that the rank will never be ready with these settings. Its process ends."""

    kind: Literal["invalid_model", "unsupported"]
    message: str


class PongRank(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Reports that the rank obeys orders. Until then it may be silent for long."""


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
Order = Join | Meet | PingRank | Mirrored  # first rank → others
Reply = RankLoaded | RankRefused | PongRank | RankReady  # others → first rank


class RankLink:
    """One end of the socket between the first rank and another. Sends and receives by blocking."""

    def __init__(self, sock: socket.socket, receives: Any, dec_hook: Callable[[type, Any], Any] | None = None) -> None:
        self._socket = sock
        self._reader: FrameReader[_Message] = FrameReader(msgspec.msgpack.Decoder(receives, dec_hook=dec_hook))
        self._came: list[_Message] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Returns once the kernel has it. OSError where the other process has gone."""
        self._socket.sendall(encode(message))

    def receive(self) -> _Message:
        """Waits for a message. EOFError where the other process has gone."""
        while not self._came:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise EOFError
            self._came += self._reader.feed(data)
        return self._came.pop(0)

    def send_if_room(self, message: msgspec.Struct) -> None:
        """Sends a short message without waiting. OSError where there is no room, or the other process has gone."""
        self._socket.send(encode(message), socket.MSG_DONTWAIT)

    def shut(self) -> None:
        """Ends the stream in both directions, which wakes whoever waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Gloo:
    """A `RankExchange` between processes of one machine."""

    def __init__(self, part: Part, folder: Path, timeout: float) -> None:
        """Waits for the other ranks. `folder`: private to the group; `timeout`: seconds that any rank may lag."""
        self._part = part
        torch_distributed: Any = distributed  # whose types name little of it
        self.store: Any = torch_distributed.FileStore(str(folder / "meeting"), part.ranks)
        kind = torch_distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=_LOOPBACK)]
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = kind(self.store, part.rank, part.ranks, options)
        self.sum(torch.zeros(1))  # a rank that is connected to this one may still read addresses of others

    @property
    def part(self) -> Part:
        return self._part

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up in rings: a number's sum is made in one rank and copied to the others."""
        self._group.allreduce([x]).wait()
        return x

    def share(self, x: torch.Tensor) -> torch.Tensor:
        self._group.broadcast([x], distributed.BroadcastOptions()).wait()  # from rank 0
        return x

    def collect(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        options = distributed.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(x) for _ in range(self._part.ranks)] if self._part.first else []
        self._group.gather([found] if found else [], [x], options).wait()
        return found or None


class _OnGpus:
    """What lies on a GPU is added up there; all else goes through the hosts."""

    def __init__(self, hosts: Gloo) -> None:
        self._hosts = hosts

    @property
    def part(self) -> Part:
        return self._hosts.part

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._hosts.share(x.cpu()))

    def collect(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Leaves the tensors in the host's memory."""
        return self._hosts.collect(x.cpu())


class PeerSums(_OnGpus):
    """A `RankExchange` of GPUs that write each other's memory."""

    def __init__(self, hosts: Gloo, channels: Channels, library: Kernels) -> None:
        super().__init__(hosts)
        self._channels = channels
        self._library = library
        self._launcher = launcher_of(torch.device("cuda"))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if sums_by_kernel(x, self._channels):
            self._launcher.enqueue([exchange_sum(self._library, x, self._channels)])
            return x
        return x.copy_(self._hosts.sum(x.cpu()))


class Nccl(_OnGpus):
    """A `RankExchange` of GPUs that do not write each other's memory."""

    def __init__(self, hosts: Gloo, timeout: float) -> None:
        super().__init__(hosts)
        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        torch_distributed: Any = distributed
        kind = torch_distributed.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=timeout)
        store = torch_distributed.PrefixStore("gpus", hosts.store)
        self._gpus: Any = kind(store, self.part.rank, self.part.ranks, options)
        self.sum(torch.zeros(1, device="cuda"))  # connects

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return self._hosts.sum(x)
        self._gpus.allreduce([x]).wait()
        return x

    def close(self) -> None:
        """Is called while the other ranks are there: NCCL may wait for one that has gone."""
        self._gpus.abort()
