"""Finds errors of settings before anything is opened."""

from __future__ import annotations

from pathlib import Path

from cache.api import RedisSettings
from cache.seal.keyring import Keyring
from cache.semantic.export import missing
from cache.store.redis_tls import TlsFiles


def check_key_file(path: Path) -> None:
    Keyring.read(path)


def check_redis(settings: RedisSettings) -> None:
    """Reads the named files, and does not connect. Raises OSError."""
    settings.login()
    settings.sentinel_login()
    TlsFiles(settings).context()


def missing_for_semantic(model: Path | None) -> tuple[str, ...]:
    return missing(model)
