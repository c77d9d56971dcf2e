"""Row states on the device, and how they are told of rows that come, go and move."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from engine.execution.batched.pipeline import Changes
from engine.execution.batched.telling import Telling
from engine.execution.mailbox import Mailbox
from engine.kernels import batch_sampling
from engine.kernels import rows as kernels
from engine.kernels.prefill import Parts
from engine.model.layers.many_tokens import ForwardPass


class RowMail:
    """So many rows of at most so many pages each. Calls go to torch's current stream."""

    def __init__(self, run: ForwardPass, vocabulary: int, rows: int, pages: int, device: torch.device) -> None:
        self._run = run
        self._vocabulary = vocabulary
        self.states = kernels.allocate(rows, pages, device)
        self._mail = Mailbox(rows * (1 + kernels.ENTER_WORDS + pages), device)
        self._change = kernels.change(run.library, self.states, self._mail.arrived)
        self._telling = Telling(vocabulary, device)

    def rehearse(self) -> None:
        """Does each thing once: first times take milliseconds. Rows are idle."""
        self._send([[kernels.LEAVE, 0]])
        self._fill([self._telling.rehearsal()])

    def ask(self) -> None:
        """Asks for the kernel that rows with tables of their own need."""
        batch_sampling.fill(self._run.library, self._vocabulary, self.states.token, 1)

    def sampled(self, rows: int) -> bool:
        """Whether one of the first so many row states asks for the sampling stages."""
        return self._telling.sampled(rows)

    def tell(self, changes: Changes) -> None:
        """For the next step."""
        said = self._telling.tell(changes)
        if said.tables:
            self._fill(said.tables)
        self._send(said.told)
        self._send(said.moves)

    def forget(self, rows: int) -> None:
        """The first so many have ended by themselves: what they had may be given away behind what is enqueued."""
        self._telling.tell(Changes(left=tuple(range(rows))))

    def choose(self, logits: Parts, own: kernels.RowStates, *, sampled: bool) -> None:
        """Enqueues the choice of a token for each of these rows, by the sampling stages for those that ask for them."""
        run = self._run
        run.go(kernels.pick(run.library, logits, own))
        if sampled:
            run.go(batch_sampling.sample(run.library, own.sampled, logits, own.position, own.best))

    def _send(self, told: Rows[list[int]]) -> None:
        if told:
            self._mail.send(kernels.mail_of(told))
            self._run.launcher.enqueue((kernels.times(self._change, len(told)),))

    def _fill(self, tables: Rows[batch_sampling.Tables]) -> None:
        words = kernels.mail_of([one.words() for one in tables])
        told = torch.tensor(words, dtype=torch.int32, pin_memory=True).to(self.states.token.device, non_blocking=True)
        self._run.launcher.enqueue((batch_sampling.fill(self._run.library, self._vocabulary, told, len(tables)),))
