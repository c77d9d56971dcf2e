"""The host's side of a GPU: it records graphs, sends integers to fixed addresses, and waits for entries that steps
write into pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EngineFailed

_NAP = 20e-6  # seconds between two looks
_LOOKS = 64  # after so many the stream is asked, which costs more


class IdleWork:
    """Short pieces of other work for the host, done while it waits for a long step. The engine loop names them once."""

    def __init__(self) -> None:
        self.piece: Callable[[], bool] = _nothing

    def __call__(self) -> bool:
        """Does a piece. Returns whether there was any."""
        return self.piece()


def _nothing() -> bool:
    return False


def all_entries(entries: torch.Tensor, number: int) -> list[int] | None:
    """Returns flags << 24 | token of each entry, once the device has written all of them under this number."""
    if not ((entries >> 32) & 0xFFFFFFFF == number & 0xFFFFFFFF).all():
        return None
    found: list[int] = (entries & 0xFFFFFFFF).tolist()
    return found


class RingPoller:
    """Waits between two looks at a ring of entries. All steps go to torch's current stream."""

    def __init__(self, nap: float = _NAP, idle_work: IdleWork | None = None) -> None:
        self._nap = nap
        self._idle_work = idle_work or IdleWork()
        self._looks = 0
        self._idle = False  # all that was launched has ended, so its entries are there

    def launched(self) -> None:
        """Notes that a step is in flight."""
        self._idle = False

    def wait(self) -> None:
        """Waits for a moment, or does a piece of other work. Raises EngineFailed where nothing is in flight, and what
        went wrong on the device."""
        if self._idle:
            raise EngineFailed("the device ended its steps without a token")
        if self._idle_work():
            return
        self._looks += 1
        if self._looks % _LOOKS:
            time.sleep(self._nap)
        else:
            self._idle = torch.cuda.current_stream().query()


class Recorder:
    """Records what is enqueued. Its stream lasts as long as the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def _own_stream(self) -> torch.cuda.Stream:
        """Made by the first capture."""
        from cuda.bindings import driver

        torch.cuda.current_stream(self._device).synchronize()  # so that there is a context
        status, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if int(status) != 0:
            raise EngineFailed(f"no stream to capture on: {status}")
        made: Any = torch.cuda.ExternalStream  # its stub lacks types
        stream: torch.cuda.Stream = made(int(handle), self._device)
        return stream

    def record(self, enqueue: Callable[[], None], *, rehearse: bool = False) -> torch.cuda.CUDAGraph:
        """What `enqueue` puts on the current stream. `rehearse`: done once before, on the stream of the capture, for
        what a library sets up at its first call."""
        graph = torch.cuda.CUDAGraph()
        stream = self._stream = self._stream or self._own_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if rehearse:
                enqueue()
                stream.synchronize()
            graph.capture_begin()
            try:
                enqueue()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


_SLOTS = 2  # sendings under way at once
_WORD = 4  # bytes


class Mailbox:
    """Pinned memory on one side, `arrived` on the other. A slot is written again only once its last copy is done.

    By numpy and the driver: a prompt and each change of rows wait for this, and by torch it takes the host twice as
    long. Where there is no memory, of shapes alone, nothing is sent."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._slots = [_Slot(size) for _ in range(_SLOTS)] if device.type == "cuda" else []
        self._next = 0
        self.arrived = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, values: list[int] | NDArray[np.int32], others: Sequence[tuple[int, NDArray[np.int32]]] = ()) -> None:
        """arrived[: len(values)] = values, and each of the others from its place on, in the order of the current
        stream."""
        if not self._slots:
            return
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        stream, to = torch.cuda.current_stream().cuda_stream, self.arrived.data_ptr()
        slot.wait()
        for first, part in ((0, values), *others):
            slot.words[first : first + len(part)] = part
            slot.copy(first, len(part), to, stream)
        slot.sent(stream)


class _Slot:
    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._held = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._from = self._held.data_ptr()
        event: type[torch.cuda.Event] = torch.cuda.Event
        self._owner = event()
        self._owner.record()  # there is none before
        self._event = driver.CUevent(self._owner.cuda_event)
        self.words: NDArray[np.int32] = self._held.numpy()

    def wait(self) -> None:
        """Until what was sent last has left."""
        self._went(self._driver.cuEventSynchronize(self._event))

    def copy(self, first: int, count: int, to: int, stream: int) -> None:
        """Words [first, first + count) to the same place of `to`."""
        at = _WORD * first
        self._went(self._driver.cuMemcpyHtoDAsync(to + at, self._from + at, _WORD * count, stream))

    def sent(self, stream: int) -> None:
        """All of it is on its way."""
        self._went(self._driver.cuEventRecord(self._event, stream))

    def _went(self, answer: tuple[Any]) -> None:
        if answer[0] != 0:
            raise EngineFailed(f"the GPU takes no copy: {answer[0]}")
