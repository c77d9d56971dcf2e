"""Whole servers."""

from __future__ import annotations

from tests.service.conftest import serve, template

__all__ = ["serve", "template"]
