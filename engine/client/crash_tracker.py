"""Attributes crashes of the engine process to requests, and quarantines those that cause them.

After a crash every request of the step is a suspect. When one is submitted again, the steps around the place of the
crash (its *solo*) run for it alone. If the process dies in one of those, no other request can be the cause, and this
one is refused from then on. So a request kills two processes at most, and no other is ever blamed.

Requests are identified by a keyed hash of prompt and sampling without the seed, since a retry has another. The key
is the front's own, so that neither table nor log reveals a prompt.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import astuple, replace

from engine.api import GenerationRequest
from engine.errors import Quarantined

_log = logging.getLogger(__name__)
_MOST = 4096  # hashes that are kept; beyond that the oldest goes
_KEPT = 600.0  # seconds after the last death

Solo = tuple[int, int]  # a step that begins with this many output tokens, from and up to, is run for this request alone
NO_SOLO: Solo = (0, 0)


@dataclass(frozen=True, slots=True)
class _Suspect:
    solo: Solo
    quarantined: bool
    until: float


class CrashTracker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._entries: OrderedDict[bytes, _Suspect] = OrderedDict()  # the one that died last comes last
        self.quarantines = 0  # requests that were found to end processes; one may be found again when it is forgotten

    def __len__(self) -> int:
        return len(self._entries)

    def solo(self, request: GenerationRequest) -> Solo:
        """The steps to run alone. Raises Quarantined."""
        entry = self._known(request)
        if entry is None:
            return NO_SOLO
        if entry.quarantined:
            raise Quarantined("this request has ended the engine process twice and is not run any more")
        return entry.solo

    def died_together(self, who: Iterable[tuple[GenerationRequest, int]], ahead: int) -> None:
        """Records a crash of a step that fed these requests, with their delivered tokens; it may have begun `ahead`
        tokens before or after those."""
        for request, made in who:
            begin, end = max(0, made - ahead), made + ahead + 1
            known = self._known(request)
            if known is not None and known.quarantined:
                continue
            if known is not None:
                begin, end = min(begin, known.solo[0]), max(end, known.solo[1])
            self._keep(request, (begin, end), quarantined=False)

    def died_alone(self, request: GenerationRequest, made: int, ahead: int) -> None:
        if self._known(request) is None:
            self.died_together([(request, made)], ahead)
            return
        self._keep(request, NO_SOLO, quarantined=True)
        self.quarantines += 1
        _log.error("request %s has ended two engine processes and is refused from now on", self._hash(request).hex())

    def ended(self, request: GenerationRequest) -> None:
        if self._entries:
            self._entries.pop(self._hash(request), None)

    def _known(self, request: GenerationRequest) -> _Suspect | None:
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._entries.popitem(last=False)
        return self._entries.get(self._hash(request)) if self._entries else None

    def _keep(self, request: GenerationRequest, solo: Solo, quarantined: bool) -> None:
        name = self._hash(request)
        self._entries[name] = _Suspect(solo, quarantined, self._clock() + _KEPT)
        self._entries.move_to_end(name)
        if len(self._entries) > _MOST:
            self._entries.popitem(last=False)

    def _hash(self, request: GenerationRequest) -> bytes:
        keyed = hashlib.blake2b(array("q", request.token_ids).tobytes(), digest_size=16, key=self._key)
        keyed.update(
            repr((astuple(replace(request.sampling, seed=0)), request.logprobs, request.prompt_logprobs)).encode()
        )
        return keyed.digest()
