"""Answers similarly worded questions from the cache: embedder, index, guard, evidence."""
