"""The one mutable record of a live request. Only the engine loop writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.api import GenerationRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: prompt, output so far, pages, and where it stands."""

    request: GenerationRequest
    token_ids: list[int]  # prompt, then output
    slot: int = -1  # index into per-sequence device state while it runs, else -1
    computed: int = 0  # tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)  # page i holds positions 16·i … 16·i + 15
    paused: bool = False  # its reader is behind
    first_planned_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    key: int = 0  # its name between processes; the scheduler has one sequence a key

    @property
    def prompt_length(self) -> int:
        """Tokens given by the caller."""
        return len(self.request.token_ids)

    @property
    def output_length(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.token_ids)
