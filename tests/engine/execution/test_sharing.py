"""Who does which rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.execution.sharing import Sharing
from engine.scheduling.plan import Row, RowResult

Rows = tuple[Row, ...]
ROWS = tuple(Row(key, key, 0, 1, True) for key in range(5))


class Worker:
    """Takes the rows it likes, and notes what it did."""

    def __init__(self, likes: Callable[[int], bool]) -> None:
        self.likes = likes
        self.did: list[list[int]] = []

    def claims(self, rows: Rows) -> Rows:
        return tuple(row for row in rows if self.likes(row.key))

    def run(self, rows: Rows) -> Mapping[int, RowResult]:
        self.did.append([row.key for row in rows])
        return {row.key: RowResult((100 + row.key,)) for row in rows}


class Ahead(Worker):
    """Has something under way, once."""

    def __init__(self, likes: Callable[[int], bool], held: set[int]) -> None:
        super().__init__(likes)
        self.held = held
        self.handed: list[list[int]] = []

    def hand_over(self, rows: Rows) -> Mapping[int, RowResult]:
        keys = [row.key for row in rows]
        if not self.held & {*keys}:
            return {}
        self.held = set()
        self.handed.append(keys)
        return {key: RowResult((200 + key,)) for key in keys}


def everything(key: int) -> bool:
    return True


def test_each_does_what_those_before_it_left() -> None:
    first, second = Worker(lambda key: key % 2 == 0), Worker(lambda key: key > 2)
    results, left = Sharing([first, second]).run(ROWS)
    assert (first.did, second.did) == ([[0, 2, 4]], [[3]])
    assert {key: result.token_ids for key, result in results.items()} == {key: (100 + key,) for key in (0, 2, 4, 3)}
    assert [row.key for row in left] == [1]


def test_nobody_is_asked_for_nothing() -> None:
    first, second = Worker(everything), Worker(everything)
    assert Sharing([first, second]).run(ROWS)[1] == ()
    assert second.did == []


class Patient(Worker):
    """Waits for what others launched ahead."""

    waits = True


def test_rows_are_taken_over_once_what_is_under_way_was_brought() -> None:
    better, other = Patient(lambda key: key < 3), Ahead(everything, {1})
    sharing = Sharing([better, other])
    results, left = sharing.run(ROWS)
    assert better.did == []
    assert (other.handed, other.did) == ([[0, 1, 2]], [[3, 4]])
    assert [results[key].token_ids[0] for key in range(5)] == [200, 201, 202, 103, 104]
    assert left == ()
    sharing.run(ROWS)
    assert better.did == [[0, 1, 2]]


def test_who_does_not_wait_takes_them_at_once() -> None:
    better, other = Worker(lambda key: key < 3), Ahead(everything, {1})
    Sharing([better, other]).run(ROWS)
    assert (better.did, other.handed) == ([[0, 1, 2]], [])


def test_who_comes_first_hands_over_by_itself() -> None:
    """It sees the rows before the others do."""
    first, second = Ahead(lambda key: key < 3, {4}), Worker(everything)
    Sharing([first, second]).run(ROWS)
    assert first.handed == []
    assert second.did == [[3, 4]]
