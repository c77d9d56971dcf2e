"""How steps are done: one decoder a file, the registry best first, ending in eager, which does every step.

A decoder that is fast at some plans only (pure decode, few rows) says so in `accepts`; eager does the others. It may
bring several ids a row, as far as the row's pages reach. State that it keeps of a slot is stale when a row's start is
not where it left off: then it reads the sequence anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.api import Objection
from engine.checkpoint import Progress
from engine.decoders import eager
from engine.decoders.parts import Parts
from engine.errors import Unsupported
from engine.plan import StepPlan, StepResult


class Decoder(Protocol):
    """Does steps on one model."""

    def warmup(self, progress: Progress) -> None:
        """What must be ready before the first request."""

    def accepts(self, plan: StepPlan) -> bool:
        """Whether it does this step; if not, eager does."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step. Called in torch's inference mode."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DecoderEntry:
    """One line of the registry."""

    name: str
    why_not: Callable[[Parts], str | None]  # None: it can serve this model on this machine
    make: Callable[[Parts], Decoder]


DECODERS: tuple[DecoderEntry, ...] = (DecoderEntry("eager", eager.why_not, eager.EagerDecoder),)


@dataclass(frozen=True, slots=True)
class Choice:
    """The decoder in use, and why better ones are not."""

    name: str
    decoder: Decoder
    objections: tuple[Objection, ...]


def choose(wanted: str, parts: Parts, registry: tuple[DecoderEntry, ...] = DECODERS) -> Choice:
    """The first without objection, or the one asked for by name. Raises Unsupported where that one cannot hold."""
    objections: list[Objection] = []
    for entry in registry:
        if wanted not in ("auto", entry.name):
            continue
        reason = entry.why_not(parts)
        if reason is None:
            return Choice(entry.name, entry.make(parts), tuple(objections))
        objections.append(Objection(decoder=entry.name, reason=reason))
    if not objections:
        names = ", ".join(entry.name for entry in registry)
        raise Unsupported(f"decoder {wanted!r} is not in this build; use auto or one of {names}")
    reasons = "; ".join(f"{one.decoder}: {one.reason}" for one in objections)
    raise Unsupported(f"decoder {wanted!r} cannot serve this model here ({reasons}); use decoder auto")
