"""Captured graphs, and integers sent to fixed addresses on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.build import BuildError


class Graphs:
    """Graphs by key, captured on one stream, which lasts as long as the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._held: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, enqueue: Callable[[], None], *, captured: bool = True) -> None:
        """Enqueues on torch's current stream: a graph, captured at its first use, or piece by piece."""
        if captured:
            self.capture(key, enqueue).replay()
        else:
            enqueue()

    def capture(self, key: Hashable, enqueue: Callable[[], None], *, rehearse: bool = False) -> torch.cuda.CUDAGraph:
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self.record(enqueue, rehearse=rehearse)
        return found

    def record(self, enqueue: Callable[[], None], *, rehearse: bool = False) -> torch.cuda.CUDAGraph:
        """`rehearse`: enqueues once before, on the stream of the capture, for what a library sets up at its first
        call."""
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

    def clear(self) -> None:
        self._held.clear()

    def _own_stream(self) -> torch.cuda.Stream:
        from cuda.bindings import driver

        torch.cuda.current_stream(self._device).synchronize()  # so that there is a context
        status, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if int(status) != 0:
            raise BuildError(f"no stream to capture on: {status}")
        made: Any = torch.cuda.ExternalStream  # its stub lacks types
        stream: torch.cuda.Stream = made(int(handle), self._device)
        return stream


def device_seconds(enqueue: Callable[[], None]) -> float:
    """Returns how long the device takes for what `enqueue` puts on the current stream. Waits for it."""
    event: type[torch.cuda.Event] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    enqueue()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


_SLOTS = 2  # sendings under way at once
_WORD = 4  # bytes


class Mailbox:
    """Pinned memory on one side, `arrived` on the other. A slot is written again only once its last copy is done. Uses
    numpy and the driver: torch would take the host twice as long. Where shapes have no memory, nothing is sent."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._slots = [_Slot(size) for _ in range(_SLOTS)] if device.type == "cuda" else []
        self._next = 0
        self.arrived = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, values: list[int] | NDArray[np.int32], others: Sequence[tuple[int, NDArray[np.int32]]] = ()) -> None:
        """arrived[: len(values)] = values, and each of the others from its place on, in stream order."""
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
        self._went(self._driver.cuEventSynchronize(self._event))

    def copy(self, first: int, count: int, to: int, stream: int) -> None:
        """Words [first, first + count) to the same place of `to`."""
        at = _WORD * first
        self._went(self._driver.cuMemcpyHtoDAsync(to + at, self._from + at, _WORD * count, stream))

    def sent(self, stream: int) -> None:
        self._went(self._driver.cuEventRecord(self._event, stream))

    def _went(self, answer: tuple[Any]) -> None:
        if answer[0] != 0:
            raise RuntimeError(f"the GPU takes no copy: {answer[0]}")
