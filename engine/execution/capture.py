"""Captures graphs on a stream of its own, which the driver alone makes: torch's first stream allocates pools of 32 and
more streams, which take 70 MiB of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.errors import EngineFailed


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
