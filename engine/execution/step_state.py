"""What executors are made from: a loaded model, and the state that all of them share and none of them owns."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.constraints.constraints import Constraints
from engine.execution.speculation.draft_model import DraftModel
from engine.kernels.step import StepWeights
from engine.kv.kv_cache import KvCache
from engine.linear.plain_copies import PlainCopies
from engine.model.transformer import Transformer
from engine.sampling.sampler import Sampler
from engine.scheduling.sequence_state import SequenceTable


class Unfit(Exception):
    """An executor found while it was made that it cannot serve here; says why in one line."""


@dataclass(slots=True)
class DecodeWeights:
    """The model as the decode kernels read it, and why the head is read in one pass, if it is."""

    made: tuple[StepWeights, str | None] | None = None  # by the first executor that wants it


@dataclass(frozen=True, slots=True)
class Parts:
    """One loaded model and the state of the steps on it."""

    model: Transformer
    pool: KvCache
    sampler: Sampler  # with the token counts that penalties need, by slot
    max_sequences: int
    max_context: int  # tokens
    sequences: SequenceTable = field(default_factory=SequenceTable)
    constraints: Constraints = field(default_factory=Constraints)
    plain: PlainCopies = field(default_factory=PlainCopies)
    decode: DecodeWeights = field(default_factory=DecodeWeights)
    draft: DraftModel | None = None
