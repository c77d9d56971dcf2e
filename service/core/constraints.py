"""Constraints of callers, checked and made into what the engine takes. The last ones are remembered: most callers send
one schema again and again."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from engine.api import Constraint
from engine.constraints.budget import MOST_DEATHS, REFUSED_FOR
from service.core.errors import InvalidRequest, Violation
from service.core.request import ConstraintText, Origin
from service.core.text.jobs import Refusal, pack
from service.core.text.processes import JobDied, TextProcesses

Key = tuple[str, tuple[str, ...]]  # kind and texts
_KEPT: Final = 4 * 2**20  # bytes of text
_MOST_DEADLY: Final = 1024  # digests of constraints whose deaths are remembered
_DEADLY: Final = "is too complex: the process that checks it does not survive it"


class Constraints:
    """Of one server. Belongs to one event loop."""

    def __init__(self, processes: TextProcesses, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        self._known: OrderedDict[Key, str] = OrderedDict()
        # By digest of tenant and constraint: deaths, and when refusals end, on the clock.
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._size = 0

    async def read(self, given: ConstraintText | None, origin: Origin) -> Constraint | None:
        """Raises InvalidRequest where it cannot be used; and as TextProcesses.run."""
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
        """Compiles a constraint in a text process and returns its grammar.

        Counts the processes that die of it, by tenant and constraint. From MOST_DEATHS deaths on, the constraint is
        refused without a process until REFUSED_FOR seconds after the last death, so that one caller cannot keep
        killing processes."""
        name = hashlib.blake2b(pack((origin.tenant, key)), digest_size=16).digest()
        died, until = self._deaths.get(name, (0, 0.0))
        try:
            if died >= MOST_DEATHS and self._clock() < until:
                raise Refusal(_DEADLY)
            return (await self._processes.run("constraint", pack(key), origin.deadline, origin.tenant)).decode()
        except Refusal as error:
            raise InvalidRequest((Violation(field, str(error)),)) from None
        except JobDied:
            self._deaths[name] = died + 1, self._clock() + REFUSED_FOR
            self._deaths.move_to_end(name)
            if len(self._deaths) > _MOST_DEADLY:
                self._deaths.popitem(last=False)
            raise InvalidRequest((Violation(field, _DEADLY),)) from None

    def _keep(self, key: Key, found: str) -> None:
        if key not in self._known:
            self._known[key] = found
            self._size += _size(key, found)
        while self._size > _KEPT:
            self._size -= _size(*self._known.popitem(last=False))


def _size(key: Key, found: str) -> int:
    return sum(map(len, key[1])) + len(found)
