"""What the host does while it waits for a long step on the device. Torch-free."""

from __future__ import annotations

from collections.abc import Callable


class Meanwhile:
    """The engine loop says what, once; who waits for the device asks for a piece of it between two looks."""

    def __init__(self) -> None:
        self.piece: Callable[[], bool] = _nothing

    def __call__(self) -> bool:
        """Does a short piece of other work; whether there was any."""
        return self.piece()


def _nothing() -> bool:
    return False
