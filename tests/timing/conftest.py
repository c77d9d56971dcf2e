"""Tests that measure time: each compares two things that it measured in turns, in one run.

`make proofs` runs them one after the other, with nothing beside them.
"""

from __future__ import annotations

from tests.service.conftest import serve, template

__all__ = ["serve", "template"]
