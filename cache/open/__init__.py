"""Opens caches: the front its caches and counters, the engine its store of keys and values. In a module each, since an
engine that opens blocks must not load Redis's asyncio client or the embedder."""
