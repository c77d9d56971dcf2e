"""Launches of captured steps on the GPUs of a split model.

The first rank's pipelines update and launch a device through `LedSteps`, which sends the same to the other ranks. They
launch the same graphs in the same order, and never poll: every rank chooses the same tokens, since the sums within the
graphs give all ranks the same bits. What an update needs of sequences is in a table that follows the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msgspec.structs import replace

from engine.errors import EngineFailed
from engine.execution.batch_pipeline import BatchRow, Changes
from engine.execution.graphs.prefill import GraphPrefill
from engine.execution.pipeline import Half, MorePages, Rewrite, RowState, StepLaunch
from engine.execution.registry import Executor
from engine.execution.router import Capacity, StepOptions
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceTable
from engine.worker.messages import (
    AppendTokens,
    BeginStep,
    ChangeRows,
    EnteredRow,
    ExtendRow,
    FeedPrompts,
    LaunchSteps,
    Mirrored,
    WriteRows,
    WrittenRow,
)

Update = Rewrite | MorePages | Changes
Mirror = Callable[[Mirrored], AbstractContextManager[None]]  # sends an order to the other ranks


class Steps(Protocol):
    """A `RowDevice` or a `BatchDevice`."""

    def update(self, update: Any) -> None: ...

    def launch(self, launch: StepLaunch) -> None: ...

    def poll(self, index: int, number: int) -> Any: ...

    def wait(self) -> None: ...


class LedSteps:
    """The first rank's device, whose updates and launches the other ranks repeat on theirs."""

    def __init__(self, number: int, own: Steps, mirror: Mirror) -> None:
        """`number`: of the device, the same on all ranks."""
        self._number = number
        self._own = own
        self._mirror = mirror

    def update(self, update: Update) -> None:
        with self._mirror(order_of_update(self._number, update)):
            self._own.update(update)

    def launch(self, launch: StepLaunch) -> None:
        with self._mirror(order_of_launch(self._number, launch)):
            self._own.launch(launch)

    def poll(self, index: int, number: int) -> Any:
        return self._own.poll(index, number)

    def wait(self) -> None:
        self._own.wait()


class LedPrompts:
    """The first rank's executor of prompts. The other ranks compute the same passes; what they choose is dropped."""

    def __init__(self, own: GraphPrefill, mirror: Mirror) -> None:
        self._own = own
        self._mirror = mirror
        self.lookahead_tokens = own.lookahead_tokens
        self.max_tokens_per_row = own.max_tokens_per_row
        self.capacity: Capacity = own.capacity
        self.switches: Mapping[str, str | None] = own.switches

    def warmup(self, progress: Progress) -> None:
        self._own.warmup(progress)

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        with self._mirror(FeedPrompts(share, options, dict(self._own.passes.costs))):
            return self._own.run(share, options)

    def close(self) -> None:
        self._own.close()


def order_of_update(device: int, update: Update) -> WriteRows | ExtendRow | ChangeRows:
    match update:
        case Rewrite(rows=rows, number=number):
            written = [
                WrittenRow(one.sequence.slot, one.position, one.last_position, one.unreported, one.most_drafts)
                for one in rows
            ]
            return WriteRows(device, written, number)
        case MorePages():
            return ExtendRow(device, update)
        case Changes(left=left, entered=entered, paged=paged, moved=moved):
            rows_in = [EnteredRow(one.sequence.slot, one.index, one.first, one.last, one.pages) for one in entered]
            return ChangeRows(device, left, rows_in, paged, moved)


def order_of_launch(device: int, launch: StepLaunch) -> LaunchSteps:
    half, masks = launch.half, None
    if half is not None and half.masks is not None:
        masks = {index: bytes(mask) for index, mask in half.masks.items()}
    layers = half is not None and masks is None
    return LaunchSteps(
        device, launch.longest, launch.steps, launch.group, launch.rows, launch.options, layers=layers, masks=masks
    )


class FollowedSteps:
    """Repeats the first rank's launches on another rank."""

    def __init__(self, sequences: SequenceTable, devices: Items[Steps], prompts: GraphPrefill | None) -> None:
        """`devices`: by the first rank's numbers."""
        self._sequences = sequences
        self._devices = devices
        self._prompts = prompts

    def obey(self, order: Mirrored) -> None:
        match order:
            case BeginStep(plan=plan):
                # What chooses tokens by masks is the first rank's alone.
                admitted = tuple(replace(one, constraint=None) for one in plan.admitted)
                self._sequences.apply(replace(plan, admitted=admitted))
            case AppendTokens(rows=rows):
                for slot, ids in rows:
                    self._sequences.at(slot).token_ids.extend(ids)
            case WriteRows(device=device, rows=written, number=number):
                self._devices[device].update(Rewrite(tuple(map(self._written, written)), number))
            case ExtendRow(device=device, pages=pages):
                self._devices[device].update(pages)
            case ChangeRows(device=device, left=left, entered=entered, paged=paged, moved=moved):
                changes = Changes(left, tuple(map(self._entered, entered)), paged, moved)
                self._devices[device].update(changes)
            case LaunchSteps():
                self._devices[order.device].launch(_launch(order))
            case FeedPrompts(share=share, options=options, costs=costs):
                if self._prompts is None:
                    raise EngineFailed("this rank has no executor of prompts")
                self._prompts.passes.costs = costs
                self._prompts.run(share, options)

    def _written(self, row: WrittenRow) -> RowState:
        sequence = self._sequences.at(row.slot)
        return RowState.of(sequence, row.position, row.last_position, row.unreported, row.most_drafts)

    def _entered(self, row: EnteredRow) -> BatchRow:
        sequence = self._sequences.at(row.slot)
        version = sequence.page_table_version
        return BatchRow(sequence, row.at, row.first, row.last, row.pages, version, first=row.first)


def _launch(order: LaunchSteps) -> StepLaunch:
    half = Half(order.masks) if order.layers or order.masks is not None else None
    return StepLaunch(order.longest, order.steps, order.group, order.rows, half, order.options)


def tokens_of(rows: Items[Row], results: Mapping[int, RowResult]) -> AppendTokens:
    return AppendTokens([(row.slot, results[row.key].token_ids) for row in rows if row.sample])


def led_prompts(executors: Mapping[str, Executor], mirror: Mirror) -> dict[str, Executor]:
    """Has the other ranks follow what computes prompts."""
    return {name: LedPrompts(one, mirror) if isinstance(one, GraphPrefill) else one for name, one in executors.items()}


def prompts_of(executors: Mapping[str, Executor]) -> GraphPrefill | None:
    return next((one for one in executors.values() if isinstance(one, GraphPrefill)), None)
