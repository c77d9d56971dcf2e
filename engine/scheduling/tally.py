"""Counts what a scheduler has done since its start."""

from __future__ import annotations

from dataclasses import dataclass

from engine.ipc.events import Event
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class LoadTally:
    """Fields as in `EngineLoad`."""

    steps: int = 0
    begun: int = 0
    begun_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0

    def begin(self, sequence: Sequence) -> None:
        self.prompt_tokens += sequence.prompt_length
        self.cached_tokens += sequence.cached_tokens
        self.begun += 1
        self.begun_cached += sequence.cached_tokens > 0

    def take(self, event: Event) -> None:
        self.generated_tokens += len(event.token_ids)
        self.draft_proposed += event.draft_proposed
        self.draft_accepted += event.draft_accepted
