"""Defines the scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_sequences: int
    max_batch_tokens: int  # prompt tokens a step
    max_context: int  # tokens a sequence
    lookahead_tokens: int = 0  # how far beyond a row's first new token its pages must reach
    max_tokens_per_row: int = 1  # most ids that a row may bring
    target_tpot: float | None = None  # seconds between two tokens of a stream, at most
