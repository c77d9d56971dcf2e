"""Reports the progress of loading."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # phase, done, of how many
