"""Makes callers' constraints what the engine takes, and keeps the last ones, since most callers repeat a schema."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from engine.api import Constraint
from engine.constraints.deaths import Deaths
from service.core.errors import InvalidRequest, Violation
from service.core.request import ConstraintText, Origin
from service.core.text.sandbox.jobs import JobRefused, pack
from service.core.text.sandbox.processes import JobDied, TextProcesses

Key = tuple[str, tuple[str, ...]]  # kind and texts
_KEPT: Final = 4 * 2**20  # bytes of text
_DEADLY: Final = "is too complex: the process that checks it does not survive it"


class ConstraintReader:
    """Used from one event loop."""

    def __init__(self, processes: TextProcesses, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._known: OrderedDict[Key, str] = OrderedDict()
        self._deaths = Deaths(clock)  # by digest of tenant and constraint
        self._size = 0

    async def read(self, given: ConstraintText | None, origin: Origin) -> Constraint | None:
        """Raises InvalidRequest, and as TextProcesses.run."""
        if given is None:
            return None
        key = given.kind, given.texts
        grammar = self._known.get(key)
        if grammar is None:
            grammar = await self._made(key, given.field, origin)
            self._keep(key, grammar)
        else:
            self._known.move_to_end(key)
        return Constraint(grammar, origin.tenant)

    async def _made(self, key: Key, field: str, origin: Origin) -> str:
        """Refuses a constraint of which text processes keep dying, so that one caller cannot keep killing them."""
        name = hashlib.blake2b(pack((origin.tenant, key)), digest_size=16).digest()
        try:
            if self._deaths.refused(name):
                raise JobRefused(_DEADLY)
            return (await self._processes.run("constraint", pack(key), origin.deadline, origin.tenant)).decode()
        except JobRefused as error:
            raise InvalidRequest((Violation(field, str(error)),)) from None
        except JobDied:
            self._deaths.add(name)
            raise InvalidRequest((Violation(field, _DEADLY),)) from None

    def _keep(self, key: Key, found: str) -> None:
        if key not in self._known:
            self._known[key] = found
            self._size += _size(key, found)
        while self._size > _KEPT:
            self._size -= _size(*self._known.popitem(last=False))


def _size(key: Key, found: str) -> int:
    return sum(map(len, key[1])) + len(found)
