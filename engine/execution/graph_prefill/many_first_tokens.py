"""The tokens after several prompts of one pass, chosen together as a batched step chooses them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.batched.executor import can_choose
from engine.execution.capture import Recorder
from engine.execution.forward_pass import ForwardPass
from engine.execution.graph_decode.pipeline import NO_TOKEN
from engine.execution.graph_prefill.passes import MOST_CHUNKS
from engine.execution.mailbox import Mailbox
from engine.kernels import batch_sampling
from engine.kernels import rows as states
from engine.sampling.noise import seed_key
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

_PASSES = 64  # whose entries are kept: no step has more


def beside_others(sequence: SequenceState) -> bool:
    """Whether its first token can be chosen beside others: it needs no biases or marks of its own."""
    if not can_choose(sequence):
        return False
    row = sampled.sampled_row(sequence) if sampled.beyond_temperature(sequence) else None
    return row is None or not (row.biased or row.marked)


class ManyFirstTokens:
    """Draws for up to MOST_CHUNKS prompts at once, as `beside_others` says."""

    def __init__(self, run: ForwardPass, vocabulary: int, device: torch.device) -> None:
        self._run = run
        self._states = states.allocate(MOST_CHUNKS, 1, device)
        ring = torch.zeros(_PASSES, MOST_CHUNKS, dtype=torch.int64, pin_memory=True)
        self._report = states.Report(torch.zeros(1, dtype=torch.int32, device=device), ring)
        self._lasts = Mailbox(MOST_CHUNKS, device)
        self._mail = Mailbox(MOST_CHUNKS * (1 + states.ENTER_WORDS), device)
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
        own, logits = self._states, run.logits(hidden, self._logits)
        run.go(states.pick(run.library, logits, own))
        run.go(batch_sampling.sample(run.library, own.sampled, logits, own.position, own.best))
        run.go(states.finish(run.library, own, self._report))

    def draw(self, sequences: Rows[SequenceState], lasts: Rows[int], *, captured: bool) -> int:
        """Behind the pass in which these stand last; the number of the draw."""
        self._lasts.send([*lasts, *[0] * (MOST_CHUNKS - len(lasts))])
        told = [_entering(at, sequence).words() for at, sequence in enumerate(sequences)]
        self._mail.send(states.mail_of(told))
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


def _entering(at: int, sequence: SequenceState) -> states.Entering:
    """A row without pages, whose first step is its last."""
    stopping = sequence.stopping
    barred = stopping.stop_token_ids if stopping.min_tokens > sequence.output_length else ()
    place = len(sequence.token_ids)
    row = sampled.sampled_row(sequence) if sampled.beyond_temperature(sequence) else None
    return states.Entering(
        index=at,
        token=0,
        position=place - 1,
        last=place,
        free_from=place + 1 if barred else 0,
        temperature=sequence.sampling.temperature if row is None else 0.0,
        noise_key=seed_key(sequence.sampling.seed),
        stops=barred,
        sampled=None if row is None else row.packed(),
    )
