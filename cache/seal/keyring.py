"""The secrets of the caches, one for names and several for values, from a file that replicas share, or random.

The file has one secret a line, 64 hexadecimal digits each: `names <hex>`, then `<label> <hex>` for values. The first
label seals; all labels open, so that a key is rotated by writing the new one above the old. Changing `names` starts
anew: every entry becomes unreachable.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from cache.api import InvalidKeyFile

log = logging.getLogger(__name__)

NAMES = "names"
KEY_BYTES = 32
ID_BYTES = 4


@dataclass(frozen=True, slots=True, repr=False)
class SealingKey:
    """Sealed values carry its id."""

    secret: bytes
    id: bytes

    @classmethod
    def of(cls, secret: bytes) -> SealingKey:
        return cls(secret, hashlib.sha256(b"whippet value key id" + secret).digest()[:ID_BYTES])


@dataclass(frozen=True, slots=True, repr=False)
class Keyring:
    names: bytes
    sealing: tuple[SealingKey, ...]  # the first one seals
    shared: bool  # whether another process can have them

    @classmethod
    def generate(cls) -> Keyring:
        return cls(secrets.token_bytes(KEY_BYTES), (SealingKey.of(secrets.token_bytes(KEY_BYTES)),), shared=False)

    @classmethod
    def read(cls, path: Path) -> Keyring:
        try:
            text = path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidKeyFile(f"{path}: {type(error).__name__}") from None
        found = _parse(path, text)
        names = found.pop(NAMES, None)
        if names is None:
            raise InvalidKeyFile(f"{path}: no line begins with '{NAMES}'")
        if not found:
            raise InvalidKeyFile(f"{path}: no key for values")
        keys = tuple(SealingKey.of(secret) for secret in found.values())
        if len({key.id for key in keys}) != len(keys):
            raise InvalidKeyFile(f"{path}: one key stands there twice")
        return cls(names, keys, shared=True)

    def key(self, identity: bytes) -> SealingKey | None:
        return next((key for key in self.sealing if hmac.compare_digest(key.id, identity)), None)


def _parse(path: Path, text: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise InvalidKeyFile(f"{path}:{number}: expected a label and {2 * KEY_BYTES} hexadecimal digits")
        label, digits = parts
        if label in found:
            raise InvalidKeyFile(f"{path}:{number}: label stands there twice")
        try:
            secret = bytes.fromhex(digits)
        except ValueError:
            raise InvalidKeyFile(f"{path}:{number}: not hexadecimal") from None
        if len(secret) != KEY_BYTES:
            raise InvalidKeyFile(f"{path}:{number}: {len(secret)} bytes, not {KEY_BYTES}")
        found[label] = secret
    return found


def open_keyring(path: Path | None) -> Keyring:
    """Without a path, secrets are random, for this process alone."""
    if path is not None:
        return Keyring.read(path)
    log.debug("cache: no key file; entries can be read by this process alone, and are lost with it")
    return Keyring.generate()
