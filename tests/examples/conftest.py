"""Servers with an engine without weights."""

from tests.service.conftest import serve, template

__all__ = ["serve", "template"]
