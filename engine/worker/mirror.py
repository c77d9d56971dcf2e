"""The device of a split model: what the first rank computes, the others compute too.

The first rank sends them an order for each pass in torch, each product with the head, each launch of captured steps
(`engine.worker.launches`), and pages to read or write. All else, from plans to constraints, is the first rank's alone,
so that no choice that depends on time differs between ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

import torch

from engine.errors import EngineFailed
from engine.execution.registry import Executor, ExecutorChoice
from engine.kernels.exchange import RankSums
from engine.kv.kv_cache import KvCache
from engine.kv.page_transfer import PoolPages, RankGroup
from engine.linear import Placement
from engine.loading.load import Loading
from engine.model.attention import RowSpan, StepAttention
from engine.model.layers.parallel import RankExchange, whole_heads
from engine.model.rope import RopeTables
from engine.model.transformer import StepInput, Transformer
from engine.model.weights import Weights
from engine.scheduling.plan import PageAccess, Row, RowResult, StepPlan
from engine.scheduling.sequence_state import SequenceTable
from engine.worker.group import Nccl
from engine.worker.launches import FollowedSteps, LedSteps, Steps, led_prompts, prompts_of, tokens_of
from engine.worker.messages import BeginStep, Forward, Logits, Mirrored, Order, ReadPages, WritePages
from quant.checkpoint.config import ModelConfig

_ERROR_LENGTH: Final = 160  # characters of an error
T = TypeVar("T")


class Others(Protocol):
    """The first rank's view of the other ones."""

    def send(self, order: Order) -> None:
        """Sends an order to every other rank. Does not return where one cannot be reached."""

    def lost(self, reason: str) -> None:
        """Ends the group, since its ranks no longer do the same."""

    def close(self) -> None:
        """Ends the other ranks."""


@contextmanager
def _mirrored(others: Others, order: Order) -> Iterator[None]:
    """Sends an order to the other ranks, and ends the group where its own part of the work raises, since the others
    would wait for it."""
    others.send(order)
    try:
        yield
    except BaseException as error:
        others.lost(f"{type(error).__name__}: {error}"[:_ERROR_LENGTH])
        raise


class LeadingTransformer(Transformer):
    """The transformer of the first rank, which makes the other ranks compute their parts."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ropes: RopeTables,
        placement: Placement,
        exchange: RankExchange,
        others: Others,
    ) -> None:
        super().__init__(config, weights, ropes, placement, exchange)
        self._others = others
        self._exchange_of_ranks = exchange

    def forward(self, step: StepInput, cache: KvCache) -> torch.Tensor:
        with _mirrored(self._others, _order(step)):
            return super().forward(step, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._exchange_of_ranks.part.splits_vocabulary:  # this rank has the head whole
            return super().logits(hidden)
        with _mirrored(self._others, Logits(hidden.shape[0])):
            return super().logits(hidden)


class SplitPages(PoolPages):
    """A `PageAccess` of the first rank to keys and values of all heads: the bytes are those of one process."""

    def __init__(self, pool: KvCache, kv_heads: int, exchange: RankExchange, others: Others) -> None:
        super().__init__(pool)
        self._layout = replace(self._layout, kv_heads=kv_heads)
        self._exchange = exchange
        self._others = others

    def read(self, pages: Items[int], into: memoryview) -> None:
        with torch.inference_mode(), _mirrored(self._others, ReadPages(list(pages))):
            found = collected(self._pool, pages, self._layout.kv_heads, self._exchange)
            assert found is not None
            torch.frombuffer(into, dtype=torch.uint8).view(found.shape).copy_(found)

    def write(self, pages: Items[int], source: memoryview) -> None:
        with torch.inference_mode(), _mirrored(self._others, WritePages(list(pages))):
            content = torch.frombuffer(source, dtype=torch.uint8).clone()
            distributed(self._pool, pages, self._layout.kv_heads, self._exchange, content)


def collected(pool: KvCache, pages: Items[int], kv_heads: int, exchange: RankExchange) -> torch.Tensor | None:
    """Returns the bytes [pages, layers, 2, kv_heads, 16, bytes] of all heads on the first rank, None on the others."""
    own = pool.read_pages(torch.tensor(pages, device=pool.placement.device)).contiguous()
    return whole_heads(own.view(torch.uint8), 3, kv_heads, exchange)


def distributed(pool: KvCache, pages: Items[int], kv_heads: int, exchange: RankExchange, content: torch.Tensor) -> None:
    """Writes the rank's heads of pages. `content`: bytes of all heads; of the first rank's, the others get a copy."""
    part, shape, dtype, device = exchange.part, pool.shape, pool.placement.dtype, pool.placement.device
    exchange.share(content)
    whole = content.view(len(pages), shape.layers, 2, kv_heads, -1, shape.head_dim * dtype.itemsize)
    first = part.rank * kv_heads // part.ranks
    own = whole[:, :, :, first : first + shape.kv_heads].contiguous().view(dtype).to(device)
    pool.write_pages(torch.tensor(pages, device=device), own)


class Follower:
    """Executes the orders of the first rank on another one."""

    def __init__(
        self,
        model: Transformer,
        pool: KvCache,
        config: ModelConfig,
        exchange: RankExchange,
        steps: FollowedSteps | None = None,
    ) -> None:
        """`config`: of the whole model. `steps`: None where nothing is captured."""
        self._steps = steps
        self._model = model
        self._pool = pool
        self._config = config
        self._exchange = exchange
        self._windows = tuple(dict.fromkeys(config.windows))

    def obey(self, order: Mirrored) -> None:
        """Is called in torch's inference mode."""
        kv_heads = self._config.kv_heads
        match order:
            case Forward():
                self._model.forward(self._step(order), self._pool)
            case Logits(rows=rows):
                self._model.logits(torch.empty(rows, self._config.hidden_size))
            case ReadPages(pages=pages):
                collected(self._pool, pages, kv_heads, self._exchange)
            case WritePages(pages=pages):
                shape = replace(self._pool.shape, kv_heads=kv_heads)
                content = torch.empty(len(pages) * shape.page_bytes(self._pool.placement.dtype), dtype=torch.uint8)
                distributed(self._pool, pages, kv_heads, self._exchange, content)
            case _ if self._steps is not None:
                self._steps.obey(order)
            case _:
                raise EngineFailed(f"this rank cannot obey {type(order).__name__}")

    def _step(self, order: Forward) -> StepInput:
        device = self._model.placement.device
        ids, positions, slots = _integers(order.tokens).view(3, -1).to(device)
        spans = [RowSpan(*one) for one in order.spans]
        attention = StepAttention(spans, self._windows, self._pool, device)
        sampled = None if order.sampled is None else _integers(order.sampled).to(device)
        return StepInput(ids, positions, slots, attention, sampled)


def _order(step: StepInput) -> Forward:
    tokens = torch.stack((step.token_ids, step.positions, step.slots))
    spans = [(one.first, one.count, one.start, one.pages) for one in step.attention.spans]
    return Forward(_bytes(tokens), spans, None if step.sampled is None else _bytes(step.sampled))


def _bytes(numbers: torch.Tensor) -> bytes:
    found: bytes = numbers.to("cpu", torch.int64).contiguous().numpy().tobytes()
    return found


def _integers(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)


class FirstRank:
    """A `RankGroup` of the first rank."""

    def __init__(self, pages: SplitPages, exchange: RankExchange, others: Others, why_no_sums: str) -> None:
        self._exchange = exchange
        self.pages: PageAccess = pages
        self.why_no_sums = why_no_sums
        self._others = others
        self._devices = 0

    def led(self, device: T) -> T:
        number, self._devices = self._devices, self._devices + 1
        own: Any = device
        return cast(T, LedSteps(number, own, partial(_mirrored, self._others)))

    def lead(self, choice: ExecutorChoice) -> dict[str, Executor]:
        """Returns the executors, each of which the other ranks follow."""
        return led_prompts(dict(choice.executors), partial(_mirrored, self._others))

    def began(self, plan: StepPlan) -> None:
        if self._devices:
            self._others.send(BeginStep(plan))

    def followed(self, rows: Items[Row], results: Mapping[int, RowResult]) -> None:
        if self._devices:
            self._others.send(tokens_of(rows, results))

    def close(self) -> None:
        """Ends the other ranks."""
        if isinstance(self._exchange, Nccl):
            self._exchange.close()
        self._others.close()


class OtherRank:
    """A `RankGroup` of a rank that follows the first one."""

    def __init__(self, pool: KvCache, why_no_sums: str) -> None:
        self.pages: PageAccess = PoolPages(pool)
        self.why_no_sums = why_no_sums
        self._devices: list[Steps] = []

    def led(self, device: T) -> T:
        own: Any = device
        self._devices.append(own)
        return device

    def steps(self, choice: ExecutorChoice, sequences: SequenceTable) -> FollowedSteps:
        return FollowedSteps(sequences, self._devices, prompts_of(dict(choice.executors)))

    def began(self, plan: StepPlan) -> None: ...

    def followed(self, rows: Items[Row], results: Mapping[int, RowResult]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Split:
    """What a rank makes of its part of a model, once the ranks have met."""

    exchange: RankExchange
    others: Others | None  # None: this is not the first rank
    sums: RankSums | None = None  # of captured steps
    why_no_sums: str = "on CPUs, nothing is captured"

    def model(self, what: Loading, weights: Weights, ropes: RopeTables) -> Transformer:
        """Returns this rank's transformer."""
        config, placement = what.own_config, what.placement
        if self.others is None:
            return Transformer(config, weights, ropes, placement, self.exchange)
        return LeadingTransformer(config, weights, ropes, placement, self.exchange, self.others)

    def group(self, pool: KvCache, config: ModelConfig) -> RankGroup:
        """Returns what this rank has of the others. `config`: of the whole model."""
        if self.others is None:
            return OtherRank(pool, self.why_no_sums)
        pages = SplitPages(pool, config.kv_heads, self.exchange, self.others)
        return FirstRank(pages, self.exchange, self.others, self.why_no_sums)

    def agree(self, what: str) -> None:
        """Raises EngineFailed where not all ranks have the same text, whose launches would wait for each other."""
        number = zlib.crc32(what.encode())
        if self.least(number) != -self.least(-number):
            raise EngineFailed(f"the ranks differ: this one has {what}")

    def least(self, number: int) -> int:
        """Returns the least of all ranks' numbers."""
        table = torch.zeros(self.exchange.part.ranks, dtype=torch.int64)
        table[self.exchange.part.rank] = number
        return int(self.exchange.sum(table).min())

    def total(self, number: int) -> int:
        """Returns the sum of all ranks' numbers."""
        return int(self.exchange.sum(torch.tensor([number])))
