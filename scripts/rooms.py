"""Implements import-linter's contract for rooms: what a room does not list it may not import.

A room is a folder or a file directly under one of the four packages; a line named like a package is the room of the
files at its top that have no line of their own. A room without a line is closed both ways, so a new folder fails until
the table states what it may import and what may import it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

WHERE = "pyproject.toml, contract `rooms`"


@dataclass(frozen=True, slots=True)
class Table:
    """Permitted imports between rooms, by dotted names. A name stands for all that is below it."""

    rooms: Mapping[str, tuple[str, ...]]  # importing room, or a module within one → what it may import
    packages: Mapping[str, tuple[str, ...]]  # third-party package → who may import it
    without: Mapping[str, tuple[str, ...]]  # third-party package → who must not reach it even through others

    @classmethod
    def read(cls, rooms: Iterable[str], packages: Iterable[str], without: Iterable[str]) -> Table:
        """Parses lines `name: other other`. Raises ValueError."""
        return cls(_lines(rooms), _lines(packages), _lines(without))


def _lines(lines: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, colon, others = line.partition(":")
        if not colon or name in found:
            raise ValueError(f"{line!r} is not `name: other other`, or stands there twice")
        found[name] = tuple(others.split())
    return found


def violations(graph: ImportGraph, table: Table) -> list[str]:
    """Returns a sentence for each fault, with its remedy. Empty where all is well."""
    ours = {name.partition(".")[0] for name in graph.modules if not graph.is_module_squashed(name)}
    modules = sorted(name for name in graph.modules if name.partition(".")[0] in ours)
    rooms = {name: _room(graph, table, name) for name in modules}
    return [*_without_line(rooms, table), *_forbidden(graph, table, rooms, ours), *_reached(graph, table)]


def unused(graph: ImportGraph, table: Table) -> list[str]:
    """Returns permissions that no import uses."""
    rooms = {name: _room(graph, table, name) for name in graph.modules}
    return [*_unused_arrows(graph, table, rooms), *_unused_packages(graph, table)]


def _room(graph: ImportGraph, table: Table, module: str) -> str:
    root, _, rest = module.partition(".")
    room = f"{root}.{rest.partition('.')[0]}" if rest else root
    is_file = bool(rest) and room == module and not graph.find_children(room)
    return root if is_file and room not in table.rooms and root in table.rooms else room


def _without_line(rooms: Mapping[str, str], table: Table) -> Iterator[str]:
    for room in sorted(set(rooms.values())):
        if "." in room and room not in table.rooms:
            yield (
                f"{room} is a room without a line, so it is closed: add `{room}: …` with what it may import, and name "
                f"it in the lines of those that may import it ({WHERE})"
            )
    for name in table.rooms:
        if name not in rooms:
            yield f"{name} has a line and is no module: take the line out ({WHERE})"


def _forbidden(graph: ImportGraph, table: Table, rooms: Mapping[str, str], ours: set[str]) -> Iterator[str]:
    for importer, room in rooms.items():
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            package = imported.partition(".")[0]
            if package in ours:
                allowed = [room, *table.rooms.get(room, ()), *table.rooms.get(importer, ())]
                if rooms[imported] == room or (room in table.rooms and _covered(imported, allowed)):
                    continue
                who = f"`{room}: … {rooms[imported]}`"
            else:
                if package in sys.stdlib_module_names or _covered(importer, table.packages.get(package, ())):
                    continue
                who = f"`{package}: … {room}`"
            line = _line_of(graph, importer, imported)
            yield f"{importer}{line} imports {imported}, which no line allows: do without, or write {who} ({WHERE})"


def _reached(graph: ImportGraph, table: Table) -> Iterator[str]:
    for package, names in table.without.items():
        for name in names if package in graph.modules else ():
            for chain in sorted(graph.find_shortest_chains(importer=name, imported=package, as_packages=True)):
                yield f"{name} must do without {package}, and reaches it: {' → '.join(chain)} ({WHERE})"


def _unused_arrows(graph: ImportGraph, table: Table, rooms: Mapping[str, str]) -> Iterator[str]:
    for name, others in table.rooms.items():
        importers = [module for module, room in rooms.items() if name in (module, room)]
        imported = set().union(*(graph.find_modules_directly_imported_by(one) for one in importers))
        for other in others:
            if not any(_covered(one, (other,)) for one in imported):
                yield f"{name} imports nothing of {other}"


def _unused_packages(graph: ImportGraph, table: Table) -> Iterator[str]:
    for package, others in table.packages.items():
        importers = graph.find_modules_that_directly_import(package) if package in graph.modules else set()
        for other in others:
            if not any(_covered(one, (other,)) for one in importers):
                yield f"{other} does not import {package}"


def _covered(module: str, by: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in by)


def _line_of(graph: ImportGraph, importer: str, imported: str) -> str:
    details = graph.get_import_details(importer=importer, imported=imported)
    return f" (line {details[0]['line_number']})" if details else ""


class RoomsContract(Contract):
    """`rooms`, `packages` and `without` are lists of lines `name: other other`; see `Table`."""

    rooms = fields.ListField(subfield=fields.StringField())
    packages = fields.ListField(subfield=fields.StringField())
    without = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        lists: list[list[str]] = [getattr(self, name) for name in ("rooms", "packages", "without")]
        found = violations(graph, Table.read(*lists))
        return ContractCheck(kept=not found, metadata={"violations": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for sentence in check.metadata["violations"]:
            output.print_error(f"- {sentence}", bold=False)
