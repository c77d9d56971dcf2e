"""Makes the TLS context of connections to Redis."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

from cache.api import RedisSettings

NO_PASSWORD = ""  # of a private key: without one OpenSSL would ask on the terminal

Seen = tuple[int, int]  # when a file was changed, and its size


class TlsFiles:
    """Makes a context again only when one of its files has changed: reading the system's authorities takes 70 ms.
    Thread-safe."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._made: tuple[list[Seen], ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext | None:
        """None where no TLS is wanted. Raises OSError, of which SSLError is one."""
        settings = self._settings
        if not settings.where.tls:
            return None
        files = (settings.ca_file, settings.cert_file, settings.key_file)
        with self._lock:
            seen = [_seen(path) for path in files if path is not None]
            if self._made is None or self._made[0] != seen:
                self._made = seen, _made(*files)
            return self._made[1]


def _made(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    if cert is not None and key is not None:
        context.load_cert_chain(cert, key, password=NO_PASSWORD)
    return context


def _seen(path: Path) -> Seen:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
