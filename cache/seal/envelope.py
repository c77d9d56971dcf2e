"""Seals stored values: versioned, bounded in size, encrypted with AES-256-GCM, bound to their name.

Layout: magic 3 · version 1 · key id 4 · nonce 12 · ciphertext · tag 16. The first 8 bytes and the entry's name are
authenticated along, so that a value under another name, or from another version, does not open.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cache.api import CacheKey, Counter
from cache.seal.keyring import ID_BYTES, Keyring

MAGIC = b"WPC"
VERSION = 1
NONCE = 12
TAG = 16
HEADER = len(MAGIC) + 1 + ID_BYTES
OVERHEAD = HEADER + NONCE + TAG


class Envelope:
    """What does not open is None and a count with the reason as its label."""

    def __init__(self, keyring: Keyring, max_bytes: int, counter: Counter) -> None:
        self._ciphers = {key.id: AESGCM(key.secret) for key in keyring.sealing}
        self._current = keyring.sealing[0].id
        self._max_bytes = max_bytes
        self._counter = counter

    def seal(self, key: CacheKey, value: bytes, max_bytes: int | None = None) -> bytes | None:
        """Returns None, counted, where the value is larger than the bound, or than the tighter `max_bytes`."""
        if len(value) > min(self._max_bytes, self._max_bytes if max_bytes is None else max_bytes):
            self._counter.count("cache_too_large", key.kind.name.lower())
            return None
        header = MAGIC + bytes([VERSION]) + self._current
        nonce = os.urandom(NONCE)
        return header + nonce + self._ciphers[self._current].encrypt(nonce, value, header + key.name.encode())

    def open(self, key: CacheKey, sealed: bytes) -> bytes | None:
        header, nonce = sealed[:HEADER], sealed[HEADER : HEADER + NONCE]
        reason = self._why_not(sealed, header)
        if not reason:
            try:
                cipher = self._ciphers[header[len(MAGIC) + 1 :]]
                return cipher.decrypt(nonce, sealed[HEADER + NONCE :], header + key.name.encode())
            except InvalidTag:
                reason = "forged"
        self._counter.count("cache_rejected", reason)
        return None

    def _why_not(self, sealed: bytes, header: bytes) -> str:
        if len(sealed) < OVERHEAD:
            return "short"
        if len(sealed) > self._max_bytes + OVERHEAD:
            return "long"
        if not header.startswith(MAGIC):
            return "foreign"
        if header[len(MAGIC)] != VERSION:
            return "version"
        if header[len(MAGIC) + 1 :] not in self._ciphers:
            return "key"
        return ""
