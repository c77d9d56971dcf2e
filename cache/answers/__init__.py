"""Exact answers, and one generation for all who ask the same at the same time."""
