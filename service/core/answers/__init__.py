"""Obtains an answer from a cache, a shared generation, or the engine."""
