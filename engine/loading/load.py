"""Loads weights of any format onto their device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.linear import LinearLoader, Placement, load_dense
from engine.linear.huge_pages import lay_in_order
from engine.linear.quantized import Reader, loader_of, quantized_reader
from engine.loading.border import checkpoint_errors
from engine.loading.dummy import DummyLinears, DummyWeights
from engine.loading.formats import FolderFormat
from engine.loading.gguf import GgufLinears
from engine.loading.parts import of_part
from engine.loading.progress import Progress
from engine.loading.unpacking import returning
from engine.model.split import WHOLE, Part, own_config, slices
from engine.model.weights import Weights, load_weights
from engine.settings import EngineSettings
from quant.checkpoint import digest
from quant.checkpoint.check import check_folder
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.formats import described_by, read_spec
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.mapped import MappedTensors
from quant.checkpoint.opening import open_checkpoint
from quant.checkpoint.slices import SlicedTensors
from quant.checkpoint.source import TensorSource
from quant.checkpoint.spec import GgufSpec
from quant.checkpoint.tensors import dense_tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights, the SHA-256 of them and their config, and their form's name. Where a model is split over processes of
    one host, which read the same files, only the first rank has a digest."""

    weights: Weights
    digest: str
    weight_format: str


@dataclass(frozen=True, slots=True)
class Loading:
    config: ModelConfig
    form: FolderFormat
    placement: Placement
    part: Part = WHOLE  # of the model that `config` describes

    @property
    def own_config(self) -> ModelConfig:
        """Returns the shape of what is loaded."""
        return self.config if self.part == WHOLE else own_config(self.config, self.part)


def load(settings: EngineSettings, folder: Path, what: Loading, progress: Progress) -> LoadedWeights:
    """Raises InvalidModel, one line that names the file."""
    with returning(what.placement.device):
        dummy = settings.load_format == "dummy"
        hashed = what.part.first or settings.ranks_elsewhere > 0
        loaded = _dummy(settings.seed, folder, what) if dummy else _folder(folder, what, hashed, progress)
        if what.placement.device.type == "cpu":
            lay_in_order(loaded.weights.in_order())
        return loaded


def check(folder: Path, config: ModelConfig, form: FolderFormat) -> None:
    """Checks by headers that the folder's tensors are those of its config and format. Raises InvalidModel."""
    with checkpoint_errors(folder):
        checkpoint = open_checkpoint(folder)
        try:
            _check(checkpoint, config, form)
        finally:
            checkpoint.close()


def _check(checkpoint: MappedTensors, config: ModelConfig, form: FolderFormat) -> None:
    if form.spec is None:
        read_spec(checkpoint.folder, checkpoint.names())  # refuses packed tensors that no config explains
    check_folder(checkpoint, config, form.spec)


def _dummy(seed: int, folder: Path, what: Loading) -> LoadedWeights:
    config, placement, spec = what.config, what.placement, what.form.in_memory
    source = DummyWeights(dense_tensors(config), seed, placement)
    read = None if spec is None else DummyLinears(spec, seed, placement.device)
    with checkpoint_errors(folder):
        weights = _weights(source, what, read)
    seen = digest.of_text("dummy", what.form.name, str(seed), repr(config), str(placement.dtype))
    return LoadedWeights(weights, _identity(seen, what.form), what.form.name)


def _folder(folder: Path, what: Loading, hashed: bool, progress: Progress) -> LoadedWeights:
    config, form = what.config, what.form
    with checkpoint_errors(folder):
        dtype = what.placement.dtype
        checkpoint = open_checkpoint(folder, lambda done, total: progress("weights", done, total), dtype)
        files = (*checkpoint.files, *described_by(folder)) if hashed else ()
        fingerprint = digest.WeightsDigest(files)
    try:
        with checkpoint_errors(folder, checkpoint):
            _check(checkpoint, config, form)
            weights = _weights(checkpoint, what, _reader(checkpoint, form))
            checkpoint.close()
            if isinstance(checkpoint, GgufTensors):
                _log.info("%s: %s", folder.name, checkpoint.costs)
            return LoadedWeights(weights, _identity(fingerprint.result(), form), form.name)
    finally:
        fingerprint.close()


def _weights(source: TensorSource, what: Loading, read: Reader | None) -> Weights:
    """`read`: reads one linear; None: they are plain."""
    if what.part == WHOLE:
        return load_weights(what.config, source, _loader(read), what.placement)
    own, spec = slices(what.config, what.part), what.form.in_memory
    read = None if read is None else of_part(read, source, own, spec)
    return load_weights(what.own_config, SlicedTensors(source, own, spec), _loader(read), what.placement)


def _loader(read: Reader | None) -> LinearLoader:
    return load_dense if read is None else loader_of(read)


def _reader(checkpoint: MappedTensors, form: FolderFormat) -> Reader | None:
    if isinstance(checkpoint, GgufTensors) and isinstance(form.spec, GgufSpec):
        return GgufLinears(form.spec, checkpoint.costs)
    return quantized_reader(form.spec, "int8" if form.int8 else None)


def weights_digest(folder: Path, form: FolderFormat) -> str:
    """The digest that `load` would find. Reads every weight. Raises InvalidModel."""
    with checkpoint_errors(folder):
        checkpoint = open_checkpoint(folder)
        checkpoint.close()
        fingerprint = digest.WeightsDigest((*checkpoint.files, *described_by(folder)))
        try:
            return _identity(fingerprint.result(), form)
        finally:
            fingerprint.close()


def _identity(files: str, form: FolderFormat) -> str:
    """Combines the digest of the files with everything else that decides what the weights compute."""
    made = [form.name] if form.int8 else []
    return digest.of_text(files, *made) if made else files
