"""Starts the ranks of a model that is to be split, and connects them."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import Unsupported
from engine.kernels.build import BuildError, GpuKernels
from engine.kernels.peers import NoPeers
from engine.loading.formats import FolderFormat, read_folder
from engine.loading.load import Loading
from engine.loading.progress import Progress
from engine.model.layers.parallel import RankExchange
from engine.model.split import Part, why_not_split
from engine.settings import EngineSettings
from engine.worker.group import Gloo, Nccl, PeerSums
from engine.worker.hardware import pick_device, pick_ranks, through_nccl, why_no_peers
from engine.worker.mirror import Others, Split
from engine.worker.peer_memory import open_sums
from engine.worker.ranks import Ranks
from engine.worker.required_kernels import most_tokens
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.digest import of_texts
from quant.checkpoint.tensors import dense_tensors

_log = logging.getLogger(__name__)
PAYS_FROM = 3 << 30  # bytes of weights for each further GPU. An estimate: fewer than 3.9 GB were not measured


class Membership(Protocol):
    """A rank's place in the group of a split model."""

    @property
    def part(self) -> Part: ...

    @property
    def here(self) -> int:
        """Returns how many ranks are on this host."""

    @property
    def others(self) -> Others | None:
        """Returns the other ranks, for the first one."""

    def meet(self, progress: Progress) -> RankExchange:
        """Waits until all ranks have loaded, and connects them."""

    def met(self) -> None:
        """Is called once nothing more is to be connected."""


def start_ranks(settings: EngineSettings, progress: Progress) -> Ranks | None:
    """Starts the other ranks of a model that is to be split, and awaits those of other hosts. Raises InvalidModel or
    Unsupported, and leaves none behind."""
    device = pick_device(settings.device)
    if settings.tensor_parallel == 1 or (settings.tensor_parallel == "auto" and device.type == "cpu"):
        return None
    config, form = read_folder(Path(settings.model), settings.quantization)
    form = form.on(device.type)
    useful = partial(pays, settings, config, form)
    ranks = pick_ranks(settings.tensor_parallel, device, useful, elsewhere=settings.ranks_elsewhere)
    if ranks == 1:
        return None
    if settings.draft_model is not None and device.type == "cuda":
        raise Unsupported(f"tensor-parallel {ranks}: a draft model is for one GPU; leave out draft-model, or use 1")
    require_split(settings.model, config, form, ranks)
    return Ranks(settings, ranks, on_gpus=device.type == "cuda", progress=progress)


def pays(settings: EngineSettings, config: ModelConfig, form: FolderFormat, ranks: int) -> bool:
    """Returns whether a model should be split over `ranks` GPUs, where `auto` decides."""
    if settings.draft_model is not None or why_not_split(config, form.in_memory, ranks) is not None:
        return False
    return why_no_peers(ranks) is None and weight_bytes(config, form) >= PAYS_FROM * (ranks - 1)


def weight_bytes(config: ModelConfig, form: FolderFormat, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns about how many bytes the weights take."""
    item = 0.5 if form.in_memory is not None else dtype.itemsize  # bytes a weight, or somewhat more
    return int(item * sum(math.prod(shape) for shape in dense_tensors(config).values()))


def require_split(model: str, config: ModelConfig, form: FolderFormat, ranks: int) -> None:
    """Raises Unsupported for a model that cannot be split over `ranks` ranks."""
    if (reason := why_not_split(config, form.in_memory, ranks)) is not None:
        raise Unsupported(f"tensor-parallel {ranks}: {model} cannot be split: {reason}; use fewer processes")


def connect_ranks(
    settings: EngineSettings,
    what: Loading,
    digest: str,
    member: Membership,
    gpu: GpuKernels,
    tokens: int,
    progress: Progress,
) -> Split:
    """Waits until all ranks have loaded. `digest`: of this rank's weights. `tokens`: of a pass, at most. Raises
    EngineFailed where hosts have different models."""
    exchange = member.meet(progress)
    try:
        split = Split(exchange, member.others)
        if settings.ranks_elsewhere:
            texts = of_texts(Path(settings.model))
            split.agree(f"{what.placement.dtype}, weights with digest {digest} and texts with digest {texts}")
        if what.placement.device.type == "cpu" or not isinstance(exchange, Gloo):
            return split
        return _on_gpus(settings, what, member.others, exchange, gpu, tokens)
    finally:
        member.met()


def _on_gpus(
    settings: EngineSettings, what: Loading, others: Others | None, hosts: Gloo, gpu: GpuKernels, tokens: int
) -> Split:
    device, one_host = what.placement.device, settings.ranks_elsewhere == 0
    reason = why_no_peers(what.part.ranks) if one_host else "some are on other hosts"
    if reason is None:
        try:
            sums = open_sums(what.own_config, hosts, device, most_tokens(tokens))
            return Split(PeerSums(hosts, sums.many, gpu.open(device)), others, sums)
        except (NoPeers, BuildError) as failure:
            reason = str(failure)
    if what.part.first:
        _log.warning("%s", through_nccl(what.part.ranks, reason))
    return Split(Nccl(hosts, settings.hang_timeout, one_host=one_host), others, None, reason)
