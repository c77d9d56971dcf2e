"""The one mutable record of a live request. Only the engine loop writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.api import GenerationRequest

CLOSED = -1  # no term: a chain that grows no more


@dataclass(slots=True, eq=False)
class PrefixPage:
    """Written by `engine.kv.prefix_index` alone."""

    hash: bytes
    number: int  # of the page
    users: int  # live sequences whose chain it is part of
    indexed: bool = True  # whether it can still be found


@dataclass(slots=True, eq=False)
class Prefix:
    """Written by `engine.kv.prefix_index` alone."""

    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of its full pages, as far as anyone asked
    pages: list[PrefixPage] = field(default_factory=list)  # that it uses: of the first full pages, without a gap
    made: list[PrefixPage] = field(default_factory=list)  # those of them that are its own work
    term: int = CLOSED


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerationRequest
    token_ids: list[int]  # prompt, then output
    slot: int = -1  # index into per-sequence device state while it runs, else -1
    computed: int = 0  # tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)  # page i holds positions 16·i … 16·i + 15
    planned_pages: int = 0  # of `pages`, how many plans have named since it got its slot
    paused: bool = False  # its reader is behind
    fetching: bool = False  # waits for keys and values from the shared tier
    first_planned_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    key: int = 0  # its name between processes; the scheduler has one sequence a key
    prefix: Prefix = field(default_factory=Prefix)
    reached: int = 0  # the most that `computed` ever was
    cached_tokens: int = 0  # of the prompt, that others had computed
    scored: int = 0  # log-probabilities of the prompt that its reader got
    solo: tuple[int, int] = (0, 0)  # steps from and up to these output tokens feed no other sequence

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def in_solo(self) -> bool:
        return self.solo[0] <= self.output_length < self.solo[1]

    def scores(self, end: int) -> bool:
        return self.scored < min(end, self.prompt_length - 1)

    def advance(self, computed: int) -> None:
        self.computed = computed
        self.reached = max(self.reached, computed)

    def skip_to(self, computed: int) -> None:
        """Advances over shared pages. Tokens computed before the sequence lost its pages are no gain."""
        self.cached_tokens += max(0, min(computed, self.prompt_length) - self.reached)
        self.advance(computed)
