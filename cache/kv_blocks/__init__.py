"""Keys and values in Redis, for the engine: synchronous, raw RESP, no redis-py and no asyncio."""
