"""Caches exact answers, and coalesces identical requests of the moment into one generation (single-flight)."""
