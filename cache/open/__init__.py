"""Opens the front's caches and counters, and the engine's store of keys and values: in a module each, since the engine
must load neither Redis's asyncio client nor the embedder."""
