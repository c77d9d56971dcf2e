"""Stores the addresses by which ranks connect to each other: on one host in a file; with ranks of other hosts the first
rank keeps the addresses, and sends them over its links to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from torch import distributed

from engine.errors import EngineFailed
from engine.worker.messages import AskKey, KeyIs, PutKey, RankLink

_torch_distributed: Any = distributed  # whose types name little of it


def file_store(folder: Path, ranks: int) -> Any:
    """Returns a store in a file of `folder`, which is private to the group."""
    return _torch_distributed.FileStore(str(folder / "meeting"), ranks)


class Keys:
    """Holds, in the first rank, the values that all ranks have sent."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Callable[[bytes], None]]] = {}

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            waiting = self._waiting.pop(key, [])
            self._changed.notify_all()
        for tell in waiting:
            tell(value)

    def tell(self, key: str, tell: Callable[[bytes], None]) -> None:
        """Calls `tell` with the value: at once where it is known, else when it comes."""
        with self._changed:
            value = self._values.get(key)
            if value is None:
                self._waiting.setdefault(key, []).append(tell)
                return
        tell(value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for the value. Raises EngineFailed where it does not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise EngineFailed("another rank did not connect")
            return self._values[key]


class _KeyHolder(Protocol):
    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes: ...


class AskedKeys:
    """Reads and writes the keys of the first rank over the link to it."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._one = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        self._link.send(PutKey(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for the value, for as long as the first rank waits. Raises EOFError where the first rank has gone."""
        with self._one:
            self._link.send(AskKey(key))
            answer = self._link.next_order()
        assert isinstance(answer, KeyIs)
        return answer.value


class LinkedStore(_torch_distributed.Store):  # type: ignore[misc]
    """A store of `torch.distributed` over `Keys` or `AskedKeys`. Once all are connected it is closed: libraries ask
    now and then whether another process left a word, and here none does."""

    def __init__(self, keys: _KeyHolder, timeout: float) -> None:
        super().__init__()
        self._keys = keys
        self._timeout: Final = timeout
        self._closed = False

    def set(self, key: str, value: bytes | str) -> None:
        if not self._closed:
            self._keys.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        if self._closed:
            raise EngineFailed("the ranks are connected already")
        return self._keys.get(key, self._timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return False

    def close(self) -> None:
        self._closed = True
