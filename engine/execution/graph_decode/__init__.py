"""Rows of one token as captured CUDA graphs, launched ahead of their tokens."""
