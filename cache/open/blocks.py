"""Opens the engine's store of keys and values."""

from __future__ import annotations

from cache.api import BlockLayout, BlockSettings, Counter, InvalidKeyFile, OpenBlockStore
from cache.kv_blocks.store import RedisBlocks
from cache.seal.keyring import Keyring


def open_blocks(settings: BlockSettings, layout: BlockLayout, counter: Counter) -> OpenBlockStore:
    """Raises InvalidKeyFile: blocks that no other process can open are not worth writing."""
    if settings.key_file is None:
        raise InvalidKeyFile("the shared tier of keys and values needs a key file")
    return RedisBlocks(settings, layout, Keyring.read(settings.key_file), counter)
