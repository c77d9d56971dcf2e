"""The process of a rank other than the first: `python -m engine.worker.rank --fd N`.

It loads its part of the model, and then does as the first rank says on the socket N, until that closes it. The first
rank starts it, or, on another host, `whippet rank`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
import threading
import time
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
from engine.worker.group import Gloo
from engine.worker.launches import FollowedSteps
from engine.worker.meeting import AskedKeys, LinkedStore, file_store
from engine.worker.messages import (
    Join,
    Meet,
    Order,
    RankFailed,
    RankLink,
    RankLoaded,
    RankReady,
    RankRefused,
    RankWorking,
)
from engine.worker.mirror import Follower, OtherRank
from engine.worker.parent import bound_to_parent
from quant.checkpoint.errors import BadFile

_log = logging.getLogger(__name__)
_SIGNS = 16  # of life, in a hang timeout
_WORKED = 0.01  # seconds of a processor between two of them, at least


def main() -> int:
    """Returns 0 where the first rank has gone, 2 where the rank refused to load, 1 where something failed."""
    parser = argparse.ArgumentParser(prog="engine.worker.rank")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the first rank")
    parser.add_argument("--parent", type=int, required=True, help="the process that started this one")
    parser.add_argument("--gpu", type=int, required=True, help="its number on this host, where GPUs compute")
    parser.add_argument("--here", type=int, required=True, help="ranks on this host")
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s rank %(levelname)s %(message)s")
    if not bound_to_parent(given.parent):
        return 0
    link = RankLink(socket.socket(fileno=given.fd), Order, as_path)
    try:
        return _serve(link, given.gpu, given.here)
    except (EOFError, ConnectionError):
        return 0
    except Exception:
        _log.exception("the process of a rank broke")
        with contextlib.suppress(OSError):
            link.send(RankFailed())
    return 1


def _serve(link: RankLink, gpu: int, here: int) -> int:
    given = link.receive()
    assert isinstance(given, Join)
    settings = given.settings
    link.keep_alive(settings.hang_timeout)
    logging.getLogger().setLevel(settings.log_level.upper())
    if settings.log_format == "json":
        use_json("rank")
    member = Member(link, given, here)
    if given.on_gpus:
        torch.cuda.set_device(gpu)
    if link.address:  # else the first rank sees by itself whether this process computes
        threading.Thread(target=member.tell, name="signs of life", daemon=True).start()
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

    def __init__(self, link: RankLink, given: Join, here: int) -> None:
        self.part = Part(given.rank, given.ranks, splits_vocabulary=not given.on_gpus)
        self.here = here
        self._ready = threading.Event()
        self._store: LinkedStore | None = None
        self.others = None  # for this rank to lead
        self._link = link
        self._given = given

    def meet(self, progress: Progress) -> RankExchange:
        """Reports that this rank has loaded, and connects to the others once all have."""
        self._link.send(RankLoaded())
        meet = self._link.next_order()
        assert isinstance(meet, Meet)
        timeout = self._given.settings.hang_timeout
        if meet.folder is not None:
            store = file_store(Path(meet.folder), self.part.ranks)
        else:
            store = self._store = LinkedStore(AskedKeys(self._link), timeout)
        return Gloo(self.part, store, timeout, self._link.address or meet.address)

    def met(self) -> None:
        """The first rank removes the folder where they met."""
        if self._store is not None:
            self._store.close()

    def tell(self) -> None:
        """Reports, until the rank is ready, that the process computes."""
        worked = 0.0
        with contextlib.suppress(OSError):
            while not self._ready.wait(self._given.settings.hang_timeout / _SIGNS):
                before, worked = worked, time.process_time()
                if worked - before >= _WORKED:
                    self._link.send(RankWorking())

    def obey(self, prepared: PreparedModel, steps: FollowedSteps | None) -> None:
        """Obeys orders until the first rank has gone: then ends the process at once, as what tidies up may wait for
        that rank."""
        assert prepared.split is not None
        parts = prepared.parts
        follower = Follower(parts.model, parts.pool, prepared.config, prepared.split.exchange, steps)
        self._ready.set()
        self._link.send(RankReady())
        with torch.inference_mode():
            while True:
                follower.obey(self._next())

    def _next(self) -> Any:
        try:
            return self._link.next_order()
        except (EOFError, ConnectionError):
            logging.shutdown()
            os._exit(0)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
