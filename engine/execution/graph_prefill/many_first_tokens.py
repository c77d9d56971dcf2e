"""The tokens after several prompts of one pass, chosen together as a batched step chooses them."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Rows

import torch

from engine.errors import EngineFailed
from engine.execution.capture import Recorder
from engine.execution.forward_pass import ForwardPass
from engine.execution.graph_decode.pipeline import NO_TOKEN
from engine.execution.graph_prefill.passes import MOST_CHUNKS
from engine.execution.mailbox import Mailbox
from engine.kernels import rows as states
from engine.kernels.tokens import MAX_STOPS
from engine.sampling.noise import seed_key
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

_PASSES = 64  # whose entries are kept: no step has more


class ManyFirstTokens:
    """Draws for up to MOST_CHUNKS prompts at once, greedy ones and those with a temperature alone."""

    def __init__(self, run: ForwardPass, vocabulary: int, device: torch.device) -> None:
        self._run = run
        self._states = states.allocate(MOST_CHUNKS, 1, device)
        ring = torch.zeros(_PASSES, MOST_CHUNKS, dtype=torch.int64, pin_memory=True)
        self._report = states.Report(torch.zeros(1, dtype=torch.int32, device=device), ring)
        self._lasts = Mailbox(MOST_CHUNKS, device)
        self._mail = Mailbox(MOST_CHUNKS * 19, device)
        self._change = states.change(run.library, self._states, self._mail.arrived)
        self._logits = torch.zeros(MOST_CHUNKS, vocabulary, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._number = 0  # of the last draw

    def warmup(self, recorder: Recorder) -> None:
        """Captures, and does each thing once."""
        self._lasts.send([0] * MOST_CHUNKS)
        self._graph = recorder.record(self._choose, rehearse=True)
        self._graph.replay()
        torch.cuda.synchronize()
        self._number = int(self._report.number)

    def _choose(self) -> None:
        run = self._run
        hidden = run.buffers.x.index_select(0, self._lasts.arrived)
        run.go(states.pick(run.library, run.logits(hidden, self._logits), self._states))
        run.go(states.finish(run.library, self._states, self._report))

    def draw(self, sequences: Rows[SequenceState], lasts: Rows[int], *, captured: bool) -> int:
        """Behind the pass in which these stand last; the number of the draw."""
        self._lasts.send([*lasts, *[0] * (MOST_CHUNKS - len(lasts))])
        told = [_entering(at, sequence) for at, sequence in enumerate(sequences)]
        words = len(told[0])
        offsets = range(len(told), len(told) * (words + 1), words)
        self._mail.send([*offsets, *(word for one in told for word in one)])
        self._run.launcher.enqueue((states.times(self._change, len(told)),))
        self._number += 1
        if captured and self._graph is not None:
            self._graph.replay()
        else:
            self._choose()
        return self._number

    def read(self, number: int, count: int) -> list[RowResult]:
        """An id for each, or none where the scores were no numbers. The device has ended."""
        found = []
        for entry in self._report.ring[number % _PASSES, :count].tolist():
            if entry >> 32 & 0xFFFFFFFF != number & 0xFFFFFFFF:
                raise EngineFailed("the device chose no token after a prompt")
            found.append(RowResult(() if entry >> 24 & NO_TOKEN else (entry & 0xFFFFFF,)))
        return found

    def close(self) -> None:
        """Drops the graph."""
        self._graph = None


def _entering(at: int, sequence: SequenceState) -> list[int]:
    """A row without pages, whose first step is its last."""
    stopping = sequence.stopping
    barred = stopping.stop_token_ids if stopping.min_tokens > sequence.output_length else ()
    place = len(sequence.token_ids)
    return [
        states.ENTER,
        at,
        0,
        place - 1,
        place,
        place + 1 if barred else 0,
        *struct.unpack("<i", struct.pack("<f", sequence.sampling.temperature)),
        *struct.unpack("<2i", struct.pack("<q", seed_key(sequence.sampling.seed))),
        *barred,
        *[-1] * (MAX_STOPS - len(barred)),
        0,
    ]
