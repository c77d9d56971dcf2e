"""From a model folder, or its config alone, to weights in their places, whatever format the folder has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidModel
from engine.linear import Placement
from engine.linear.quantized import loader_of, quantized_loader
from engine.loading import digest
from engine.loading.checkpoint import Checkpoint, Progress, check_tensors
from engine.loading.dummy import DummyLinears, DummyWeights
from engine.loading.formats import BESIDE, CONFIG, Format, read_format
from engine.loading.unpacking import returning
from engine.model.config import ModelConfig
from engine.model.weights import HEAD, Weights, dense_tensors, load_weights, plain_tensors, projections
from engine.settings import EngineSettings
from quant.cpu import dense_plan
from quant.errors import BadConfig, BadTensor, QuantError
from quant.read import tensor_names

AGAIN = "download the file again, or use the config.json that belongs to it"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights, the SHA-256 of what they and their config are, and what their form is called."""

    weights: Weights
    digest: str
    weight_format: str


@dataclass(frozen=True, slots=True)
class Loading:
    """What is loaded, and to where. `exact`: products in the placement's own type, however slow (dtype float32)."""

    config: ModelConfig
    form: Format
    placement: Placement
    exact: bool


def load(settings: EngineSettings, folder: Path, what: Loading, progress: Progress) -> Loaded:
    """Raises InvalidModel, one line that names the file."""
    with returning(what.placement.device):
        return (
            _dummy(settings.seed, folder, what) if settings.load_format == "dummy" else _folder(folder, what, progress)
        )


def _dummy(seed: int, folder: Path, what: Loading) -> Loaded:
    config, placement, spec = what.config, what.placement, what.form.in_memory
    source = DummyWeights(dense_tensors(config), seed, placement)
    if spec is None:
        load_linear = quantized_loader(None, None)
    else:
        load_linear = loader_of(DummyLinears(spec, seed, placement.device), None if what.exact else dense_plan())
    try:
        weights = load_weights(config, source, load_linear, placement)
    except BadConfig as error:
        raise InvalidModel(f"{folder}: {error}; mend the config") from error
    seen = digest.of_text("dummy", what.form.name, str(seed), repr(config), str(placement.dtype))
    return Loaded(weights, _identity(seen, what), what.form.name)


def _folder(folder: Path, what: Loading, progress: Progress) -> Loaded:
    config, form = what.config, what.form
    checkpoint = Checkpoint(folder, progress)
    told = [folder / name for name in (CONFIG, BESIDE) if (folder / name).is_file()]
    fingerprint = digest.WeightsDigest((*checkpoint.files, *told))
    try:
        if form.spec is None:
            read_format(folder, "auto", checkpoint.names())  # packed tensors that no config explains
        check_folder(checkpoint, config, form)
        load_linear = quantized_loader(form.spec, "int8" if form.int8 else None, what.exact)
        weights = _told_by_file(checkpoint, lambda: load_weights(config, checkpoint, load_linear, what.placement))
        checkpoint.close()
        return Loaded(weights, _identity(fingerprint.result(), what), form.name)
    finally:
        fingerprint.close()


def _identity(files: str, what: Loading) -> str:
    """The digest of the files, and of what else decides what the weights compute."""
    made = [what.form.name] if what.form.int8 else []
    exact = ["exact"] if what.exact and what.form.in_memory is not None else []
    return digest.of_text(files, *made, *exact) if made or exact else files


def check_folder(checkpoint: Checkpoint, config: ModelConfig, form: Format) -> None:
    """Whether the tensors are those of the config and the format, as far as their headers tell."""
    tied = {f"{HEAD}.weight"} if config.tied_head else set()
    if form.spec is None:
        check_tensors(checkpoint, dense_tensors(config), ignored=tied)
        return
    expected = plain_tensors(config)
    packed: set[str] = set()
    names = checkpoint.names()
    for projection in projections(config):
        for prefix in projection.prefixes:
            possible = tensor_names(prefix, form.spec)
            if not any(name in names for name in possible):
                raise InvalidModel(
                    f"{checkpoint.folder}: tensor {possible[1]} is missing; download all shards of the model"
                )
            packed.update(possible)
        expected |= {name: shape for name, shape in projection.tensors().items() if name.endswith(".bias")}
    check_tensors(checkpoint, expected, ignored=packed | tied)


def _told_by_file(checkpoint: Checkpoint, read: Callable[[], Weights]) -> Weights:
    """What `quant` finds wrong, with the file that it is wrong in."""
    try:
        return read()
    except BadTensor as error:
        where = checkpoint.file(error.tensor) if error.tensor in checkpoint.names() else checkpoint.folder
        raise InvalidModel(f"{where}: {error}; {AGAIN}") from error
    except QuantError as error:
        raise InvalidModel(f"{checkpoint.folder}: {error}; {AGAIN}") from error
