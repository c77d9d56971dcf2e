"""Exact answers, and single-flight: one generation for all identical requests of the moment."""
