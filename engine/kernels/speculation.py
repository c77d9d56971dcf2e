"""Wrappers of `accept`, `lookup`, `replay`: a verifying step's end and the next draft; and of `follow`, `guess`,
`drafted`: a draft model's guesses before the step that verifies them.

A verifying step feeds a sequence's newest token and its draft as rows side by side: of the rows laid out for the
longest draft, the first ones that it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.attention import RowPages
from engine.kernels.build import Kernels
from engine.kernels.exchange import KEY_WORDS, Channels, defines_of, values_of
from engine.kernels.launch import Argument, Launch, Shape, Trigger, prepare
from engine.kernels.tokens import MAX_STOPS, Choice, FirstNorm, embedding

MORE, PARKED = 8, 12  # flags of a ring entry: the same step tells another; it was not fed, having no page
_THREADS, _DRAFT_THREADS = 1024, 256


@dataclass(frozen=True, slots=True)
class Verified:
    newest: torch.Tensor  # int32 [sequences]: position of the newest token, which is fed next; -1: none, or at its end
    held: torch.Tensor  # int32 [sequences]: tokens that its pages have room for
    last_position: torch.Tensor  # int32 [sequences]: a token placed there is the last
    most_drafts: torch.Tensor  # int32 [sequences]: a step
    stops: torch.Tensor  # int32 [sequences, 8], -1 for none
    count: torch.Tensor  # int32 [sequences]: entries reported
    history: torch.Tensor  # int32 [sequences, most tokens]: ids by position
    ring: torch.Tensor  # int64 [sequences, entries], pinned: count << 32 | proposed << 28 | flags << 24 | token
    token: torch.Tensor  # int32 [sequences · laid]: of the rows

    @property
    def laid(self) -> int:
        """Rows laid out for each sequence."""
        return self.token.shape[0] // self.newest.shape[0]


def allocate(sequences: int, laid: int, most_tokens: int, ring: int, device: torch.device) -> Verified:
    def integers(*size: int, value: int = 0) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.int32, device=device)

    return Verified(
        newest=integers(sequences, value=-1),
        held=integers(sequences),
        last_position=integers(sequences),
        most_drafts=integers(sequences),
        stops=integers(sequences, MAX_STOPS, value=-1),
        count=integers(sequences),
        history=integers(sequences, most_tokens),
        ring=torch.zeros(sequences, ring, dtype=torch.int64, pin_memory=device.type == "cuda"),
        token=integers(sequences * laid),
    )


def accept(
    library: Kernels,
    choice: Choice,
    state: Verified,
    places: RowPages,
    group: int,
    channels: Channels | None = None,
) -> Launch:
    """Moves the tokens chosen for `group` rows a sequence into the state, as far as the next row was fed them.
    `channels`: the best of all ranks is chosen."""
    sequences = state.newest.shape[0]
    values: dict[str, Argument] = {
        "best": choice.best,
        "assured": choice.assured,
        "token": state.token,
        "position": places.position,
        "last_position": state.last_position,
        "stops": state.stops,
        "newest": state.newest,
        "count": state.count,
        "history": state.history,
        "most_tokens": state.history.shape[1],
        "ring": state.ring,
        "ring_size": state.ring.shape[1],
        **values_of(channels, sequences, KEY_WORDS * group),
        "trigger": int(Trigger.AT_ENTRY),
    }
    defines = {"OP_GROUP": group, "OP_LAID": state.laid, **defines_of(channels)}
    kernel = library.kernel("accept", "accept", defines)
    return prepare(kernel, Shape((sequences, 1, 1), 32), values)


def lookup(library: Kernels, state: Verified, places: RowPages, first: FirstNorm) -> Launch:
    """Drafts what followed an earlier occurrence of a sequence's last few tokens."""
    return _propose(library, "lookup", state, places, first, {})


@dataclass(frozen=True, slots=True)
class Future:
    ids: torch.Tensor  # int32, as the history
    chance: float  # that it is right, at each place


def replay(library: Kernels, state: Verified, places: RowPages, first: FirstNorm, future: Future) -> Launch:
    return _propose(
        library, "replay", state, places, first, {"future": future.ids, "chance": round(future.chance * (1 << 24))}
    )


def _propose(
    library: Kernels, entry: str, state: Verified, places: RowPages, first: FirstNorm, more: dict[str, Argument]
) -> Launch:
    values: dict[str, Argument] = {
        **_stand(state),
        **_history(state),
        "token": state.token,
        "position": places.position,
        **embedding(first),
        "trigger": int(Trigger.AT_ENTRY),
        **more,
    }
    kernel = library.kernel("propose", entry, {**first.defines, "OP_LAID": state.laid})
    return prepare(kernel, Shape((state.token.shape[0], 1, 1), _THREADS), values)


@dataclass(frozen=True, slots=True)
class Guessing:
    """Has two rows for each sequence."""

    choice: Choice
    places: RowPages
    first: FirstNorm  # of the draft model
    guesses: torch.Tensor  # int32 [sequences, laid - 1]; -1: none


def follow(library: Kernels, state: Verified, own: Guessing) -> Launch:
    """Lays out each sequence's two newest tokens for the draft model's first step."""
    kernel = library.kernel("draft", "follow", _draft_defines(state, own))
    values = _stand(state) | _history(state) | _draft_values(own)
    return prepare(kernel, Shape((2 * state.newest.shape[0], 1, 1), _DRAFT_THREADS), values)


def guess(library: Kernels, state: Verified, own: Guessing, rows: int, number: int) -> Launch:
    kernel = library.kernel("draft", "guess", _draft_defines(state, own))
    more: dict[str, Argument] = {"guesses": own.guesses, "rows": rows, "number": number}
    return prepare(
        kernel, Shape((state.newest.shape[0], 1, 1), _DRAFT_THREADS), _stand(state) | _draft_values(own) | more
    )


def drafted(
    library: Kernels, state: Verified, places: RowPages, first: FirstNorm, own: Guessing, rows: int, count: int
) -> Launch:
    """Drafts `count` guesses; a step of `rows` rows a sequence made the last, not yet taken over."""
    more: dict[str, Argument] = {"best": own.choice.best, "guesses": own.guesses, "rows": rows, "count": count}
    return _propose(library, "drafted", state, places, first, more)


def _stand(state: Verified) -> dict[str, Argument]:
    return {
        "newest": state.newest,
        "held": state.held,
        "last_position": state.last_position,
        "most_drafts": state.most_drafts,
    }


def _history(state: Verified) -> dict[str, Argument]:
    return {"history": state.history, "most_tokens": state.history.shape[1]}


def _draft_defines(state: Verified, own: Guessing) -> dict[str, int]:
    return {**own.first.defines, "OP_LAID": state.laid}


def _draft_values(own: Guessing) -> dict[str, Argument]:
    return {
        "best": own.choice.best,
        "assured": own.choice.assured,
        "position": own.places.position,
        **embedding(own.first),
        "trigger": int(Trigger.AT_ENTRY),
    }
