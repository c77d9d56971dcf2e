"""Encodes and sends updates of many rows' states. Torch's allocator frees tables in the order of the stream, so that
steps in flight for a row that has left never count in another row's marks."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.execution import device_sampling as sampled
from engine.execution.batch_pipeline import BatchRow, Changes
from engine.kernels import batch_sampling
from engine.kernels import rows as states
from engine.kernels.batch_sampling import Tables
from engine.kernels.capture import Mailbox
from engine.kernels.launch import Launches
from engine.kernels.prefill import ProductParts
from engine.sampling.noise import seed_key
from engine.scheduling.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class EncodedUpdates:
    """Changes in the order in which the device must have them."""

    tables: Items[Tables]  # for `batch_sampling.fill`
    rows: Items[list[int]]  # for `rows.change`
    moves: Items[list[int]]  # likewise, and last, since they carry along what the others have written


class RowUpdateEncoder:
    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._asking: dict[int, Tables | None] = {}

    def sampled(self, rows: int) -> bool:
        """Returns whether one of the first `rows` row states asks for the sampling stages."""
        return any(index < rows for index in self._asking)

    def rehearsal(self) -> Tables:
        return Tables(bias=self._table(torch.float32), marks=self._table(torch.int32), given=(0,))

    def encode(self, changes: Changes) -> EncodedUpdates:
        for index in changes.left:
            self._asking.pop(index, None)
        rows = [[states.LEAVE, index] for index in changes.left]
        rows += [[states.PAGES, more.index, more.first, len(more.pages), *more.pages] for more in changes.paged]
        tables = []
        for own in changes.entered:
            packed, held = self._enter(own.index, own.sequence)
            rows.append(_entering(own, packed).words())
            if held is not None:
                tables.append(held)
        for to, source in changes.moved:
            self._asking.pop(to, None)
            if source in self._asking:
                self._asking[to] = self._asking.pop(source)
        return EncodedUpdates(tables, rows, [[states.MOVE, to, source] for to, source in changes.moved])

    def _enter(self, index: int, sequence: SequenceState) -> tuple[bytes | None, Tables | None]:
        self._asking.pop(index, None)
        row = sampled.sampled_row(sequence) if sampled.beyond_temperature(sequence) else None
        if row is None:
            return None, None
        self._asking[index] = None
        if not (row.biased or row.marked):
            return row.packed(), None
        bias = self._table(torch.float32) if row.biased else None
        marks = self._table(torch.int32) if row.marked else None
        self._asking[index] = Tables(bias=bias, marks=marks)
        ids, prompt = sequence.token_ids if row.marked else [], sequence.prompt_length
        tables = Tables(
            bias=bias,
            marks=marks,
            given=ids[:prompt],
            made=ids[prompt:],
            barred=sequence.stopping.stop_token_ids if row.marked else (),
            biases=sequence.sampling.logit_bias,
        )
        return row.packed(*tables.addresses), tables

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._vocabulary, dtype=dtype, device=self._device)


def _entering(own: BatchRow, packed: bytes | None) -> states.Entering:
    sequence, stops = own.sequence, own.sequence.stopping.stop_token_ids
    return states.Entering(
        index=own.index,
        token=sequence.token_ids[own.first],
        position=own.first,
        last=own.last,
        free_from=sequence.prompt_length + sequence.stopping.min_tokens if stops else 0,
        temperature=0.0 if packed else sequence.sampling.temperature,  # `pick` would draw for nothing
        noise_key=seed_key(sequence.sampling.seed),
        stops=stops,
        sampled=packed,
        pages=sequence.pages[: own.pages],
    )


class RowUpdates:
    """Holds the states of `rows` rows of `pages` pages each. Calls go to torch's current stream."""

    def __init__(self, run: Launches, vocabulary: int, rows: int, pages: int, device: torch.device) -> None:
        self._run = run
        self._vocabulary = vocabulary
        self.states = states.allocate(rows, pages, device)
        self._mailbox = Mailbox(rows * (1 + states.ENTER_WORDS + pages), device)
        self._change = states.change(run.library, self.states, self._mailbox.arrived)
        self._encoder = RowUpdateEncoder(vocabulary, device)

    def rehearse(self) -> None:
        """Runs each kernel once, while rows are idle."""
        self._send([[states.LEAVE, 0]])
        self._fill([self._encoder.rehearsal()])

    def ask(self) -> None:
        batch_sampling.fill(self._run.library, self._vocabulary, self.states.token, 1)

    def sampled(self, rows: int) -> bool:
        return self._encoder.sampled(rows)

    def send(self, changes: Changes) -> None:
        """Changes hold from the next step on."""
        encoded = self._encoder.encode(changes)
        if encoded.tables:
            self._fill(encoded.tables)
        self._send(encoded.rows)
        self._send(encoded.moves)

    def forget(self, rows: int) -> None:
        """Frees the tables of rows that have ended by themselves."""
        self._encoder.encode(Changes(left=tuple(range(rows))))

    def choose(self, logits: ProductParts, own: states.RowStates, *, sampled: bool) -> None:
        run = self._run
        run.go(states.pick(run.library, logits, own))
        if sampled:
            run.go(batch_sampling.sample(run.library, own.sampled, logits, own.position, own.best))

    def _send(self, words: Items[list[int]]) -> None:
        if words:
            self._mailbox.send(states.packed_words(words))
            self._run.launcher.enqueue((states.times(self._change, len(words)),))

    def _fill(self, tables: Items[batch_sampling.Tables]) -> None:
        words = states.packed_words([one.words() for one in tables])
        sent = torch.tensor(words, dtype=torch.int32, pin_memory=True).to(self.states.token.device, non_blocking=True)
        self._run.launcher.enqueue((batch_sampling.fill(self._run.library, self._vocabulary, sent, len(tables)),))
