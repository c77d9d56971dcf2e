"""From settings to a runner that is ready: device, weights, page pool, decoder. Everything `auto` is decided here."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import digest
from engine.api import ModelInfo
from engine.checkpoint import Checkpoint, Progress, check_tensors
from engine.decoders import DECODERS, DecoderEntry, choose
from engine.decoders.parts import Parts
from engine.dummy import DummyWeights
from engine.errors import InvalidModel, Unsupported
from engine.hardware import pick_device, pick_dtype, pick_threads
from engine.linear import Place, load_dense
from engine.model.config import ModelConfig, load_config
from engine.model.kv import KvPool, KvShape
from engine.model.rope import rope_table
from engine.model.transformer import Transformer
from engine.model.weights import HEAD, Weights, dense_tensors, load_weights
from engine.room import Room, make_room
from engine.runner import ModelRunner
from engine.sampling import Sampler
from engine.settings import PAGE_SIZE, EngineSettings

_log = logging.getLogger(__name__)
TOO_LARGE = ("allocate memory", "size calculation overflowed")  # what torch says where a CPU has too little


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights, and the SHA-256 of what they and their config are."""

    weights: Weights
    digest: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a decoder is made from, and what is told of it."""

    parts: Parts
    room: Room
    digest: str


def build(settings: EngineSettings, progress: Progress) -> ModelRunner:
    """Loads the model. Raises InvalidModel or Unsupported, each one line."""
    return make_runner(settings, prepare(settings, progress), progress)


def prepare(settings: EngineSettings, progress: Progress) -> Prepared:
    """Weights and page pool in their places."""
    folder = Path(settings.model)
    config = load_config(folder)
    device = pick_device(settings.device)
    place = Place(pick_dtype(settings.dtype, config.dtype, device), device)
    if device.type == "cpu":
        torch.set_num_threads(pick_threads(settings.threads))
    try:
        with torch.inference_mode():
            loaded = _load(settings, folder, config, place, progress)
            return _assemble(settings, config, loaded, place)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Unsupported(_no_room(folder, device, error)) from error
    except RuntimeError as error:
        if not any(sign in str(error) for sign in TOO_LARGE):
            raise
        raise Unsupported(_no_room(folder, device, error)) from error


def _load(settings: EngineSettings, folder: Path, config: ModelConfig, place: Place, progress: Progress) -> Loaded:
    expected = dense_tensors(config)
    if settings.load_format == "dummy":
        source = DummyWeights(expected, settings.seed, place)
        weights = load_weights(config, source, load_dense, place)
        return Loaded(weights, digest.of_text("dummy", str(settings.seed), repr(config), str(place.dtype)))
    if config.quantization is not None:
        raise InvalidModel(
            f"{folder / 'config.json'}: quantization_config names {config.quantization!r}, which is not served; "
            "use the bf16 or fp16 model"
        )
    checkpoint = Checkpoint(folder, progress)
    fingerprint = digest.WeightsDigest((*checkpoint.files, folder / "config.json"))
    try:
        check_tensors(checkpoint, expected, ignored=(f"{HEAD}.weight",) if config.tied_head else ())
        weights = load_weights(config, checkpoint, load_dense, place)
        checkpoint.close()
        return Loaded(weights, fingerprint.result())
    finally:
        fingerprint.close()


def _assemble(settings: EngineSettings, config: ModelConfig, loaded: Loaded, place: Place) -> Prepared:
    shape = KvShape(config.layers, config.kv_heads, config.head_dim)
    room = make_room(settings, config.max_context, shape, place)
    model = Transformer(config, loaded.weights, rope_table(config.rope, room.max_context, place.device), place)
    pool = KvPool(shape, room.pages, place, heads_outside=place.device.type == "cpu")
    sampler = Sampler(config.vocab_size, settings.max_sequences, place.device)
    return Prepared(Parts(model, pool, sampler, settings.max_sequences, room.max_context), room, loaded.digest)


def make_runner(
    settings: EngineSettings,
    prepared: Prepared,
    progress: Progress,
    registry: tuple[DecoderEntry, ...] = DECODERS,
) -> ModelRunner:
    """Chooses the decoder and warms it. Raises Unsupported where the one asked for cannot hold."""
    parts, room = prepared.parts, prepared.room
    choice = choose(settings.decoder, parts, registry)
    for objection in choice.objections:
        _log.info("decoder %s passed over: %s", objection.decoder, objection.reason)
    choice.decoder.warmup(progress)
    config, place = parts.model.config, parts.model.place
    info = ModelInfo(
        architecture=config.architecture,
        weight_format="dense",
        dtype=str(place.dtype).removeprefix("torch."),
        device=_device_name(place.device),
        decoder=choice.name,
        objections=choice.objections,
        vocab_size=config.vocab_size,
        max_context=room.max_context,
        max_sequences=settings.max_sequences,
        page_size=PAGE_SIZE,
        total_pages=room.pages,
        weights_bytes=parts.model.weights.nbytes,
        weights_digest=prepared.digest,
        tokens_per_step=choice.decoder.tokens_per_step,
    )
    last = registry[-1]
    fallback = choice.decoder if choice.name == last.name else last.make(parts)
    for name, enabled in (("graphs", settings.graphs), ("fused_kernels", settings.fused_kernels)):
        if not enabled:
            with contextlib.suppress(Unsupported):  # a decoder without it needs no turning off
                choice.decoder.switch(name, False)
    return ModelRunner(info, parts, choice.decoder, fallback)


def _device_name(device: torch.device) -> str:
    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _no_room(folder: Path, device: torch.device, error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0][:160]
    return f"{folder}: does not fit into the memory of {_device_name(device)} ({first}); use a smaller model or device"
