"""What has to look at a wall clock: each test compares two things that it measured in turns, in one run.

`make test` runs these alone, one after the other, once everything else is done.
"""

from __future__ import annotations

from tests.service.conftest import serve, template

__all__ = ["serve", "template"]
