"""The tokens after several prompts of one pass, chosen together as a batched step chooses them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from engine.execution.batched.pipeline import BatchRow, Changes
from engine.execution.batched.row_mail import RowMail
from engine.execution.capture import Recorder
from engine.execution.graph_prefill.first_token import result_of
from engine.execution.graph_prefill.passes import MOST_CHUNKS
from engine.execution.mailbox import Mailbox
from engine.execution.meanwhile import Meanwhile
from engine.execution.patience import Patience, all_told
from engine.kernels import rows as states
from engine.model.layers.many_tokens import ForwardPass
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

_PASSES = 512  # whose entries are kept: of at most 1,024 sequences, at least three prompts end in each


class ManyFirstTokens:
    """Draws for up to MOST_CHUNKS prompts at once, whose tokens kernels choose (`needs.chosen_by_kernels`)."""

    def __init__(self, run: ForwardPass, vocabulary: int, device: torch.device, meanwhile: Meanwhile) -> None:
        self._run = run
        self._rows = RowMail(run, vocabulary, MOST_CHUNKS, 1, device)
        ring = torch.zeros(_PASSES, MOST_CHUNKS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._report = states.Report(torch.zeros(1, dtype=torch.int32, device=device), ring)
        self._ends = Mailbox(MOST_CHUNKS, device)
        self._logits = torch.zeros(MOST_CHUNKS, vocabulary, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._number = 0  # of the last draw
        self._patience = Patience(nap=0.0, meanwhile=meanwhile)

    def warmup(self, recorder: Recorder) -> None:
        """Captures, and does each thing once."""
        self._ends.send([0] * MOST_CHUNKS)
        self._graph = recorder.record(self._choose, rehearse=True)
        self._graph.replay()
        self._rows.rehearse()
        torch.cuda.synchronize()
        self._number = int(self._report.number)

    def ask(self) -> None:
        """Asks for every kernel that there will be."""
        self._choose()
        self._rows.ask()

    def _choose(self) -> None:
        run = self._run
        hidden = run.ends.x.index_select(0, self._ends.arrived)
        self._rows.choose(run.logits(hidden, self._logits), self._rows.states, sampled=True)
        run.go(states.finish(run.library, self._rows.states, self._report))

    def draw(self, sequences: Rows[SequenceState], ends: Rows[int], *, captured: bool) -> int:
        """Behind the pass whose chunks of these numbers are the last of their sequences; the number of the draw."""
        self._ends.send([*ends, *[0] * (MOST_CHUNKS - len(ends))])
        self._rows.tell(Changes(entered=tuple(first_token(at, sequence) for at, sequence in enumerate(sequences))))
        self._number += 1
        if captured and self._graph is not None:
            self._graph.replay()
        else:
            self._choose()
        self._rows.forget(len(sequences))
        self._patience.launched()
        return self._number

    def read(self, number: int, count: int) -> list[RowResult]:
        """An id for each, or none where the scores were no numbers. Waits for them."""
        ring = self._report.ring[number % _PASSES, :count]
        while (entries := all_told(ring, number)) is None:
            self._patience.wait()
        return [result_of(entry) for entry in entries]

    def close(self) -> None:
        """Drops the graph."""
        self._graph = None


def first_token(at: int, sequence: SequenceState) -> BatchRow:
    """A row without pages, whose first step is its last."""
    place = len(sequence.token_ids)
    return BatchRow(sequence, at, place - 1, last=place, since=0, first=place - 1, pages=0, exchanges=0)
