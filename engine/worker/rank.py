"""The process of a rank other than the first: `python -m engine.worker.rank --fd N`.

It loads its part of the model, and then does as the first rank says on the socket N, until that closes it.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from engine.errors import InvalidModel, Unsupported
from engine.ipc.frames import as_path
from engine.loading.progress import Progress
from engine.log_lines import use_json
from engine.model.layers.parallel import RankExchange
from engine.model.split import Part
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, prepare, warmed
from engine.worker.group import (
    Gloo,
    Join,
    Meet,
    Order,
    PingRank,
    PongRank,
    RankLink,
    RankLoaded,
    RankReady,
    RankRefused,
)
from engine.worker.launches import FollowedSteps
from engine.worker.mirror import Follower, OtherRank
from engine.worker.parent import bound_to_parent
from quant.checkpoint.errors import BadFile

_log = logging.getLogger(__name__)


def main() -> int:
    """Returns 0 where the first rank has gone, 2 where the rank refused to load, 1 where something failed."""
    parser = argparse.ArgumentParser(prog="engine.worker.rank")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the first rank")
    parser.add_argument("--parent", type=int, required=True, help="the first rank's process")
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s rank %(levelname)s %(message)s")
    if not bound_to_parent(given.parent):
        return 0
    link = RankLink(socket.socket(fileno=given.fd), Order, as_path)
    try:
        return _serve(link)
    except (EOFError, ConnectionError):
        return 0
    except Exception:
        _log.exception("the process of a rank broke")
    return 1


def _serve(link: RankLink) -> int:
    given = link.receive()
    assert isinstance(given, Join)
    settings = given.settings
    logging.getLogger().setLevel(settings.log_level.upper())
    if settings.log_format == "json":
        use_json("rank")
    member = Member(link, given)
    if given.on_gpus:
        torch.cuda.set_device(given.rank)
    try:
        prepared = prepare(settings, _quiet, member=member)
    except (InvalidModel, Unsupported, BadFile) as error:
        link.send(RankRefused("unsupported" if isinstance(error, Unsupported) else "invalid_model", str(error)))
        return 2
    member.obey(prepared, _steps(settings, prepared))
    return 0


def _quiet(stage: str, done: int, total: int) -> None:
    pass


def _steps(settings: EngineSettings, prepared: PreparedModel) -> FollowedSteps | None:
    """Captures what the first rank captures. None where it captures nothing."""
    if prepared.parts.sums is None:
        return None
    choice = warmed(settings, prepared, _quiet)
    assert isinstance(prepared.parts.group, OtherRank)
    return prepared.parts.group.steps(choice, prepared.parts.sequences)


class Member:
    """A rank's view of its group."""

    def __init__(self, link: RankLink, given: Join) -> None:
        self.part = Part(given.rank, given.ranks, splits_vocabulary=not given.on_gpus)
        self.others = None  # for this rank to lead
        self._link = link
        self._given = given

    def meet(self, progress: Progress) -> RankExchange:
        """Reports that this rank has loaded, and connects to the others once all have."""
        self._link.send(RankLoaded())
        meet = self._link.receive()
        assert isinstance(meet, Meet)
        return Gloo(self.part, Path(meet.folder), self._given.settings.hang_timeout)

    def met(self) -> None:
        """The first rank removes where they met."""

    def obey(self, prepared: PreparedModel, steps: FollowedSteps | None) -> None:
        """Obeys orders until the first rank has gone: then ends the process at once, as what tidies up may wait for
        that rank."""
        assert prepared.split is not None
        parts = prepared.parts
        follower = Follower(parts.model, parts.pool, prepared.config, prepared.split.exchange, steps)
        self._link.send(RankReady())
        with torch.inference_mode():
            while True:
                order = self._next()
                if isinstance(order, PingRank):
                    self._link.send(PongRank())
                else:
                    follower.obey(order)

    def _next(self) -> Any:
        try:
            return self._link.receive()
        except (EOFError, ConnectionError):
            logging.shutdown()
            os._exit(0)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
