"""A whole decode step as a chain of launches, and its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.kernels import linear as ops
from engine.kernels import sampling, tiling, tokens
from engine.kernels.attention import (
    MANY_TOKENS,
    SLOTS,
    AttentionOp,
    Embedding,
    Heads,
    LayerAttention,
    RowPages,
    SplitScratch,
    scratch,
)
from engine.kernels.build import Kernels
from engine.kernels.exchange import Channels
from engine.kernels.gpu import LARGEST_SHARED, GpuShape
from engine.kernels.launch import Launch, Trigger
from engine.kernels.linear import Normed, ResidualUpdate
from engine.kernels.sampling import Sampling
from engine.kernels.tiling import Tiling
from engine.kernels.tokens import Choice, Fed, FirstNorm, Progress, TwoPasses
from engine.kernels.two_pass import CoarseCopy
from engine.kernels.weights import Matrix
from engine.model.split import WHOLE, Part

MOST_ROWS = 8  # of a step


@dataclass(frozen=True, slots=True)
class StepProduct:
    """A matrix and its bias, float32 [rows] or None."""

    matrix: Matrix
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_gain: torch.Tensor
    qkv: StepProduct
    attention: LayerAttention
    output: StepProduct
    mlp_gain: torch.Tensor
    gate_up: StepProduct
    down: StepProduct


@dataclass(frozen=True, slots=True)
class StepWeights:
    """A model as the chain reads it."""

    table: torch.Tensor  # bfloat16 [vocabulary, hidden]
    layers: Sequence[LayerWeights]
    final_gain: torch.Tensor
    head: Matrix
    heads: Heads
    eps: float
    angles: torch.Tensor  # float32 [positions, 2, dim]
    coarse: CoarseCopy | None = None  # of the head
    channels: Channels | None = None  # to the other ranks of a split model
    embedding_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """State of a batch's steps at fixed addresses."""

    places: RowPages
    choice: Choice
    progress: Progress
    stream: Normed
    qkv: torch.Tensor  # float32
    attended: torch.Tensor  # bfloat16
    inner: torch.Tensor  # bfloat16
    scratch: SplitScratch

    @property
    def batch(self) -> int:
        return self.places.position.shape[0]

    def first(self, rows: int) -> StepBuffers:
        """The same memory for fewer rows, which share their line of the page table where there is one for all."""
        places, choice, stream = self.places, self.choice, self.stream
        return replace(
            self,
            places=RowPages(places.position[:rows], places.pages[:rows]),
            choice=replace(
                choice,
                temperature=choice.temperature[:rows],
                noise_key=choice.noise_key[:rows],
                best=choice.best[:rows],
                assured=None if choice.assured is None else choice.assured[:rows],
                logits=None if choice.logits is None else choice.logits[:rows],
                masks=None if choice.masks is None else choice.masks[:rows],
            ),
            stream=Normed(stream.residual[:rows], stream.scaled[:rows], stream.squares[:rows], stream.eps),
            qkv=self.qkv[:rows],
            attended=self.attended[:rows],
            inner=self.inner[:rows],
            scratch=self.scratch.first(rows),
        )


def allocate(weights: StepWeights, batch: int, pages: int, ring: int, *, logits: bool = False) -> StepBuffers:
    """Idle rows of at most `pages` pages each."""
    device, hidden = weights.table.device, weights.table.shape[1]
    inner = weights.layers[0].gate_up.matrix.rows // 2

    def integers(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(size, value, dtype=dtype, device=device)

    def floats(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return StepBuffers(
        places=RowPages(integers(batch, value=-1), integers(batch, pages)),
        choice=Choice(
            temperature=floats(batch),
            noise_key=integers(batch, dtype=torch.int64),
            best=integers(batch, dtype=torch.int64),
            assured=integers(batch),
            logits=floats(batch, weights.head.rows) if logits else None,
        ),
        progress=Progress(
            token=integers(batch),
            last_position=integers(batch, value=2**31 - 1),
            stops=integers(batch, tokens.MAX_STOPS, value=-1),
            count=integers(batch),
            ring=torch.zeros(batch, ring, dtype=torch.int64, pin_memory=device.type == "cuda"),
        ),
        stream=Normed(
            floats(batch, hidden), floats(batch, hidden, dtype=torch.bfloat16), floats(batch, hidden // 8), weights.eps
        ),
        qkv=floats(batch, weights.heads.rows),
        attended=floats(batch, weights.heads.queries * weights.heads.dim, dtype=torch.bfloat16),
        inner=floats(batch, inner, dtype=torch.bfloat16),
        scratch=scratch(weights.heads, batch, device),
    )


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Division and overlap of stages. A stage's name is qkv, output, gate_up, down or head."""

    multiprocessors: int
    shared: int = LARGEST_SHARED  # bytes of shared memory that a block may ask for
    tilings: dict[str, Tiling] = field(default_factory=dict)  # where `tiling.choose` is not to decide
    trigger: Trigger = Trigger.AT_ENTRY
    dependent: bool = True
    longest: int | None = None  # tokens; a row that grows beyond traps. None: no limit but the pages
    slots: int = SLOTS  # of a warp of attention, over long contexts
    group: int = 1  # rows that are successive tokens of one sequence
    resident: int = 1  # blocks of attention on a multiprocessor, where they would be too many for one each
    two_pass: bool = False  # the head, where no row needs its logits; the weights must have a coarse copy of it
    within_top: bool = False  # and where rows need no others than those of `SampledRow.within_top`

    @classmethod
    def of(cls, gpu: GpuShape) -> ChainPlan:
        return cls(gpu.multiprocessors, gpu.shared, dependent=gpu.overlap)

    def tiling(self, stage: str, matrix: Matrix) -> Tiling:
        found = self.tilings.get(stage)
        if found is not None:
            return found
        found = tiling.choose(matrix, self.multiprocessors, pairs=stage == "gate_up", shared=self.shared)
        # These start beside the stages before: what they ask for early, those wait behind.
        if stage == "head" or (stage in ("qkv", "output") and not found.whole):
            return replace(found, window=2)
        short = self.longest is not None and self.longest <= MANY_TOKENS
        return replace(found, window=1) if stage == "down" and found.whole and short else found

    def two_passes(self, head: Matrix, coarse: CoarseCopy, channels: Channels | None = None) -> TwoPasses:
        """`channels`: each rank reads a part of the head."""
        plain = self.tiling("head", head)
        part = WHOLE if channels is None else Part(channels.rank, channels.ranks)
        own = part.vocabulary(head.rows)
        coarse = coarse.rows(own.first, own.last)
        how = tiling.choose_copy(coarse.matrix, self.multiprocessors, plain.warps, self.shared)
        rows = replace(head, rows=own.size, data=head.data[own.first : own.last])
        return TwoPasses(rows, plain, coarse, how, own.first, head.rows)


def prepare_step(
    library: Kernels,
    weights: StepWeights,
    buffers: StepBuffers,
    plan: ChainPlan,
    sampled: Sampling | None = None,
    ending: Sequence[Launch] | None = None,
    layers: tuple[Launch, ...] | None = None,
) -> tuple[Launch, ...]:
    """One step, to be enqueued again and again. Rows that `sampled` has parameters for choose by those; without it the
    head chooses for all. `ending` takes the chosen tokens over, with `channels_of_choice`, and lays out the next ones
    instead of `advance`.
    `layers`: by `prepare_layers`, shared by steps that choose in several ways. Raises BuildError."""
    rest = _choosing(library, weights, buffers, plan, sampled, ending)
    layers = layers or prepare_layers(library, weights, buffers, plan)
    return (*layers, *_chained(rest, plan, plan.trigger))


def prepare_layers(library: Kernels, weights: StepWeights, buffers: StepBuffers, plan: ChainPlan) -> tuple[Launch, ...]:
    """The first part of a step: all but the choice. Done again, it needs `prepare_start` before it. Raises
    BuildError."""
    return _chained(_layers(library, weights, buffers, plan), plan, Trigger.AFTER_WAIT)


def prepare_choice(
    library: Kernels, weights: StepWeights, buffers: StepBuffers, plan: ChainPlan, sampled: Sampling | None = None
) -> tuple[Launch, ...]:
    """The rest of a step. Raises BuildError."""
    return _chained(_choosing(library, weights, buffers, plan, sampled), plan, Trigger.AFTER_WAIT)


def _chained(stages: Iterable[Launch], plan: ChainPlan, first: Trigger) -> tuple[Launch, ...]:
    """`first`: AFTER_WAIT where the first may let its successor start only once the chain before has ended."""
    launches = []
    for index, launch in enumerate(stages):
        one = launch.with_trigger(first if index == 0 else plan.trigger)
        launches.append(one if plan.dependent else one.alone())
    return tuple(launches)


def prepare_start(library: Kernels, weights: StepWeights, buffers: StepBuffers) -> Launch:
    """Embeds the tokens that the host has placed, before the first step that feeds them."""
    return tokens.start(library, buffers.progress, buffers.places, first_norm(weights, buffers))


def prepare_first(
    library: Kernels,
    weights: StepWeights,
    buffers: StepBuffers,
    fed: Fed,
    plan: ChainPlan,
    sampled: Sampling | None = None,
) -> tuple[Launch, ...]:
    """Chooses the token behind a chunk as a step of one row does. Raises BuildError."""
    rest = [one.with_trigger(plan.trigger) for one in _choosing(library, weights, buffers, plan, sampled)]
    take = tokens.take(library, fed, weights.final_gain, buffers.stream)
    return take, *(rest if plan.dependent else [one.alone() for one in rest])


def first_norm(weights: StepWeights, buffers: StepBuffers) -> FirstNorm:
    return FirstNorm(weights.table, weights.layers[0].input_gain, buffers.stream, weights.embedding_scale)


def _layers(library: Kernels, weights: StepWeights, buffers: StepBuffers, plan: ChainPlan) -> Iterator[Launch]:
    """From the embedded tokens to the last residual."""
    stream = buffers.stream
    embedding = Embedding(weights.angles, weights.eps)
    attend = AttentionOp(
        library,
        weights.heads,
        buffers.places,
        embedding,
        buffers.scratch,
        plan.multiprocessors,
        plan.longest,
        bulk=plan.dependent,
        slots=plan.slots,
        group=plan.group,
        resident=plan.resident,
        most_shared=plan.shared,
    )
    gains = [layer.input_gain for layer in weights.layers[1:]] + [weights.final_gain]
    for layer, next_gain in zip(weights.layers, gains, strict=True):
        qkv, output, wide, down = layer.qkv, layer.output, layer.gate_up, layer.down
        how = plan.tiling("qkv", qkv.matrix)
        yield ops.linear(library, stream, qkv.matrix, qkv.bias, buffers.qkv, how)
        yield attend.prepare(layer.attention, buffers.qkv, buffers.attended)
        update = ResidualUpdate(buffers.attended, stream, layer.mlp_gain, output.bias)
        how = plan.tiling("output", output.matrix)
        yield ops.linear_residual(library, update, output.matrix, how, weights.channels)
        how = plan.tiling("gate_up", wide.matrix)
        yield ops.gate_up(library, stream, wide.matrix, wide.bias, buffers.inner, how)
        update = ResidualUpdate(buffers.inner, stream, next_gain, down.bias)
        how = plan.tiling("down", down.matrix)
        yield ops.linear_residual(library, update, down.matrix, how, weights.channels)


def channels_of_choice(weights: StepWeights, plan: ChainPlan, sampled: Sampling | None) -> Channels | None:
    """Returns channels to the other ranks where each looks for the token in its part of the vocabulary; None where each
    chooses by itself."""
    divided = plan.two_pass and weights.coarse is not None and sampled is None
    return weights.channels if divided else None


def _choosing(
    library: Kernels,
    weights: StepWeights,
    buffers: StepBuffers,
    plan: ChainPlan,
    sampled: Sampling | None,
    ending: Sequence[Launch] | None = None,
) -> Iterator[Launch]:
    """From the last residual to the state after the token."""
    how = plan.tiling("head", weights.head)
    choice = buffers.choice
    if sampled is not None:
        choice = replace(choice, logits=sampled.logits, temperature=sampled.heat)
    channels = channels_of_choice(weights, plan, sampled)
    coarse = weights.coarse if plan.two_pass else None
    if coarse is not None and sampled is None:
        both = plan.two_passes(weights.head, coarse, channels)
        yield tokens.two_pass_head(library, buffers.stream, both, choice, buffers.places)
    elif coarse is not None and sampled is not None and plan.within_top:
        both = plan.two_passes(weights.head, coarse)
        yield sampling.two_pass_top(library, buffers.stream, both, sampled, choice.masks, buffers.places)
    else:
        yield tokens.head(library, buffers.stream, weights.head, choice, buffers.places, how)
    if sampled is not None:
        yield from sampling.sampling(library, sampled, choice, buffers.places)
    if ending is None:
        first = first_norm(weights, buffers)
        yield tokens.advance(library, buffers.choice, buffers.progress, buffers.places, first, channels)
    else:
        yield from ending
