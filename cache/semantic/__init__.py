"""Answers to questions that mean the same: embedder, index, guard, evidence."""
