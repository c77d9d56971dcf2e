"""Loads the draft model: a second folder, checked against the first before either is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.constraints.constraints import Constraints
from engine.errors import Unsupported
from engine.execution.speculation.draft_model import DraftModel
from engine.kv.kv_cache import KvCache, KvShape
from engine.kv.sizing import Room
from engine.linear import Placement
from engine.loading.border import checkpoint_errors
from engine.loading.formats import FolderFormat, read_folder
from engine.loading.load import LoadedWeights
from engine.model.rope import rope_tables
from engine.model.transformer import Transformer, kv_shape
from engine.sampling.sampler import Sampler
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.digest import of_texts

_TOKENIZER = ("tokenizer.json",)


@dataclass(frozen=True, slots=True)
class DraftFolder:
    folder: Path
    config: ModelConfig
    form: FolderFormat


def read_draft(folder: Path, target: Path, config: ModelConfig) -> DraftFolder:
    """Raises InvalidModel for what is no model, Unsupported for one that does not speak the target's tokens."""
    own, form = read_folder(folder, "auto")
    if own.vocab_size != config.vocab_size:
        other = f"its vocabulary has {own.vocab_size} tokens, that of {target} has {config.vocab_size}"
        raise Unsupported(f"draft-model {folder}: {other}; use a draft with the same tokenizer")
    with checkpoint_errors(folder):
        if of_texts(folder, _TOKENIZER) != of_texts(target, _TOKENIZER):
            raise Unsupported(
                f"draft-model {folder}: its tokenizer.json is not that of {target}; use a draft with the same"
            )
    return DraftFolder(folder, own, form)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A loaded draft model without pages yet."""

    read: DraftFolder
    loaded: LoadedWeights
    placement: Placement

    @property
    def page_bytes(self) -> int:
        return self._shape.page_bytes(self.placement.activations.dtype)

    def make(self, room: Room, slots: int, constraints: Constraints) -> DraftModel:
        """Gives it as many pages, tokens of context and slots as its target."""
        config, device = self.read.config, self.placement.device
        model = Transformer(config, self.loaded.weights, rope_tables(config, room.max_context, device), self.placement)
        pool = KvCache(self._shape, room.pages, self.placement.activations, heads_outside=device.type == "cpu")
        return DraftModel(model, pool, Sampler(config.vocab_size, slots, device, constraints))

    @property
    def _shape(self) -> KvShape:
        config = self.read.config
        return kv_shape(config)
