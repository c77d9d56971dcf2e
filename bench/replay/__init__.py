"""Traces through the caches: what they would have saved, and how often wrongly. `whippet cache replay` runs it."""
