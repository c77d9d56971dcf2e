"""The front's half of the engine: requests, their token streams, and the child process. No torch."""

from engine.client.engine_client import EngineClient, texts_digest

__all__ = ["EngineClient", "texts_digest"]
