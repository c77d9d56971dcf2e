"""Obtains an answer from a cache, a generation that is shared, or the engine."""
