"""A run of keys and values in Redis: fixed header, key id, nonce, sealed payload, tag. The header describes the bytes
and their place in the chain, and is authenticated with the name, so that only the requested run opens, in the layout of
this engine."""

from __future__ import annotations

import os
import struct
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cache.api import BlockLayout, BlockRun, CacheKey, Counter, EntryKind
from cache.seal.keyring import ID_BYTES, Keyring
from cache.seal.partition import encode, mac

MAGIC = b"WPKV"
VERSION = 1
# magic · version · item bytes · layers · heads · width · page size · tokens · payload bytes · layout · hash · parent
HEADER = struct.Struct("<4sBBHHHHIQ16s32s32s")
NONCE = 12
TAG = 16
OVERHEAD = HEADER.size + ID_BYTES + NONCE + TAG


def fingerprint(layout: BlockLayout) -> bytes:
    fields = (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.item_bytes, layout.page_size)
    return sha256(encode((*fields, layout.variant))).digest()[:16]


class RunCodec:
    def __init__(self, keyring: Keyring, layout: BlockLayout, counter: Counter) -> None:
        self._names = keyring.names
        self._ciphers = {key.id: AESGCM(key.secret) for key in keyring.sealing}
        self._current = keyring.sealing[0].id
        self._layout = layout
        self._fingerprint = fingerprint(layout)
        self._counter = counter

    def key(self, partition: str, run: BlockRun) -> CacheKey:
        """A keyed name, since a bare hash of a prompt could be guessed."""
        return CacheKey(EntryKind.BLOCK, partition, mac(self._names, b"block", self._fingerprint, run.hash).hex())

    def payload_bytes(self, run: BlockRun) -> int:
        """Excludes header, nonce and tag."""
        return self._layout.token_bytes * run.tokens

    def seal(self, key: CacheKey, run: BlockRun, payload: bytes) -> bytes:
        """Raises ValueError where the payload does not match the layout."""
        if len(payload) != self.payload_bytes(run):
            raise ValueError(f"payload of {len(payload)} bytes, not {self.payload_bytes(run)}")
        header = self._header(run)
        nonce = os.urandom(NONCE)
        sealed = self._ciphers[self._current].encrypt(nonce, payload, self._bound(header, self._current, key))
        return header + self._current + nonce + sealed

    def open(self, key: CacheKey, run: BlockRun, sealed: memoryview, into: memoryview) -> bool:
        """Where anything is unexpected: False, a count, and an undefined buffer."""
        size = self.payload_bytes(run)
        header = bytes(sealed[: HEADER.size])
        identity = bytes(sealed[HEADER.size : HEADER.size + ID_BYTES])
        reason = ""
        if len(sealed) != size + OVERHEAD or len(into) != size:
            reason = "length"
        elif header != self._header(run):
            reason = "header"
        elif identity not in self._ciphers:
            reason = "key"
        else:
            nonce = bytes(sealed[HEADER.size + ID_BYTES : HEADER.size + ID_BYTES + NONCE])
            body = sealed[HEADER.size + ID_BYTES + NONCE :]
            try:
                self._ciphers[identity].decrypt_into(nonce, body, self._bound(header, identity, key), into)
            except InvalidTag:
                reason = "forged"
        if reason:
            self._counter.count("block_rejected", reason)
        return not reason

    def _header(self, run: BlockRun) -> bytes:
        a = self._layout
        shape = (a.item_bytes, a.layers, a.kv_heads, a.head_dim, a.page_size)
        place = (run.tokens, self.payload_bytes(run), self._fingerprint, run.hash, run.parent)
        return HEADER.pack(MAGIC, VERSION, *shape, *place)

    @staticmethod
    def _bound(header: bytes, identity: bytes, key: CacheKey) -> bytes:
        return header + identity + key.name.encode()
