"""Constraints of callers, checked and made into what the engine takes. The last ones are remembered: most callers send
one schema again and again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from engine.api import Constraint
from service.core.errors import InvalidRequest, Violation
from service.core.request import ConstraintText, Origin
from service.core.text.jobs import Refusal, pack
from service.core.text.processes import TextProcesses

_KEPT: Final = 4 * 2**20  # bytes of text


class Constraints:
    """Of one server. Belongs to one event loop."""

    def __init__(self, processes: TextProcesses) -> None:
        self._processes = processes
        self._known: OrderedDict[tuple[str, tuple[str, ...]], Constraint] = OrderedDict()
        self._size = 0

    async def read(self, given: ConstraintText | None, origin: Origin) -> Constraint | None:
        """Raises InvalidRequest where it cannot be used; and as TextProcesses.run."""
        if given is None:
            return None
        key = given.kind, given.texts
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        try:
            grammar = await self._processes.run("constraint", pack(key), origin.deadline, origin.tenant)
        except Refusal as error:
            raise InvalidRequest((Violation(given.field, str(error)),)) from None
        found = Constraint(grammar.decode())
        self._keep(key, found)
        return found

    def _keep(self, key: tuple[str, tuple[str, ...]], found: Constraint) -> None:
        if key not in self._known:
            self._known[key] = found
            self._size += _size(key, found)
        while self._size > _KEPT:
            self._size -= _size(*self._known.popitem(last=False))


def _size(key: tuple[str, tuple[str, ...]], found: Constraint) -> int:
    return sum(map(len, key[1])) + len(found.grammar)
