"""How rows are shared out among the executors of the registry, and why a better decoder was passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import pytest

from engine.api import Objection
from engine.errors import Unsupported
from engine.execution import eager
from engine.execution.registry import EXECUTORS, ExecutorEntry, choose, leaders
from engine.execution.router import Capacity, Role, StepOptions
from engine.execution.step_state import Parts, Unfit
from engine.scheduling.plan import RowResult, Share
from engine.scheduling.sequence_state import SequenceState
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from engine.worker.offers import PLAIN_TRIAL
from tests.contract.answers import generate, progress, requests

EAGER = EXECUTORS[-1]
Kind = TypeVar("Kind", bound="Narrow")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineSettings, PreparedModel]:
    """Eager's own model on the CPU."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(PLAIN_TRIAL)))
    settings = EngineSettings(
        model=str(folder), load_format="dummy", device="cpu", dtype="float32", max_sequences=8, kv_bytes=4 << 20
    )
    return settings, prepare(settings, progress)


def test_the_last_executor_has_no_objection(plain: tuple[EngineSettings, PreparedModel]) -> None:
    parts = plain[1].parts
    assert EAGER.name == "eager"
    assert EAGER.why_not(parts) is None
    assert len({(entry.decoder, entry.name) for entry in EXECUTORS}) == len(EXECUTORS)
    assert [entry.decoder for entry in leaders()] == ["graph", "portable", "eager"]
    assert EAGER.make(parts).capacity == Capacity()


class Narrow:
    """Computes one row of each step that decodes. Remembers which sequences it could read."""

    lookahead_tokens = 2
    max_tokens_per_row = 3
    switches: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self, parts: Parts) -> None:
        self._inner, self._sequences = eager.Eager(parts), parts.sequences
        self.seen: dict[int, list[SequenceState]] = {}  # by slot
        self.steps = 0
        self.warm = self.closed = False
        self.capacity = Capacity(many=1)

    def warmup(self, progress: Any) -> None:
        self.warm = True

    def run(self, share: Share, options: StepOptions) -> Mapping[int, RowResult]:
        assert [row.count for row in share.rows] == [1]
        self.steps += 1
        for state in self._sequences.states():
            of_slot = self.seen.setdefault(state.slot, [])
            if state not in of_slot:
                of_slot.append(state)
        return self._inner.run(share, options)

    def close(self) -> None:
        self.closed = True


def remembering(kind: type[Kind]) -> tuple[list[Kind], Callable[[Parts], Kind]]:
    """Those that were made, and what makes them."""
    made: list[Kind] = []

    def make(parts: Parts) -> Kind:
        made.append(kind(parts))
        return made[-1]

    return made, make


def saying(reason: str | None) -> Callable[[Parts], str | None]:
    """Why it cannot serve, whatever is asked."""
    return lambda parts: reason


def registry_of(name: str, make: Any, reason: str | None = None) -> tuple[ExecutorEntry, ...]:
    return (ExecutorEntry(Role.MANY, name, saying(reason), make), EAGER)


def test_an_optional_neighbour_is_taken_along_and_may_be_missing(plain: tuple[EngineSettings, PreparedModel]) -> None:
    leader, last = registry_of("graph", Narrow)
    beside = replace(leader, name="beside", make=Narrow, optional=True)
    assert [name for name, _ in choose("auto", plain[1].parts, (beside, leader, last)).executors] == [
        "beside",
        Role.MANY,
        "eager",
    ]
    refused = replace(beside, why_not=saying("not today"))
    found = choose("graph", plain[1].parts, (refused, leader, last))
    assert [name for name, _ in found.executors] == [Role.MANY, "eager"]
    assert found.missing == (Objection(decoder="beside", reason="not today"),)
    assert any(one.name == "captured_speculation" and one.decoder == "graph" for one in EXECUTORS)


def test_eager_does_what_the_chosen_executor_declines(plain: tuple[EngineSettings, PreparedModel]) -> None:
    made, make = remembering(Narrow)
    runner = make_runner(*plain, progress, registry_of("even", make))
    expected = generate(make_runner(*plain, progress), requests()[:3], 128, 512)
    assert generate(runner, requests()[:3], 128, 512) == expected
    runner.close()
    assert runner.info.decoder == "even"
    assert (made[0].warm, made[0].closed) == (True, True)
    assert made[0].steps > 10
    assert made[0].seen.keys() == {0, 1, 2}
    assert [state.key for slot in sorted(made[0].seen) for state in made[0].seen[slot]] == [0, 1, 2]
    assert (runner.info.lookahead_tokens, runner.info.max_tokens_per_row) == (2, 3)


def test_a_step_is_shared_between_the_chosen_executor_and_eager(plain: tuple[EngineSettings, PreparedModel]) -> None:
    made, make = remembering(Narrow)
    runner = make_runner(*plain, progress, registry_of("narrow", make))
    expected = generate(make_runner(*plain, progress), requests(), 128, 512)
    assert generate(runner, requests(), 128, 7) == expected
    assert made[0].steps > 40


def test_neighbours_of_one_word_are_used_together_or_missed(plain: tuple[EngineSettings, PreparedModel]) -> None:
    _, prepared = plain
    first, last = registry_of("fast", eager.Eager)
    for reason in (None, "no room"):
        beside = ExecutorEntry("fast_prompts", "fast", saying(reason), Narrow)
        choice = choose("auto", prepared.parts, (first, beside, last))
        assert choice.decoder == "fast"
        names = [name for name, _ in choice.executors]
        assert names == ([Role.MANY, "fast_prompts", "eager"] if reason is None else [Role.MANY, "eager"])
        assert choice.missing == (() if reason is None else (Objection(decoder="fast_prompts", reason="no room"),))
        assert choice.objections == ()
        alone = choose("eager", prepared.parts, (first, beside, last))
        assert [name for name, _ in alone.executors] == ["eager"]
    refused = replace(first, why_not=saying("too old"))
    choice = choose("auto", prepared.parts, (refused, replace(beside, why_not=saying(None)), last))
    assert [name for name, _ in choice.executors] == ["eager"]  # neighbours stand and fall with the first


def test_auto_passes_over_objections_and_names_them(plain: tuple[EngineSettings, PreparedModel]) -> None:
    def never(parts: Parts) -> eager.Eager:
        raise AssertionError("made in spite of its objection")

    def unfit(parts: Parts) -> eager.Eager:
        raise Unfit("no compiler")

    parts = plain[1].parts
    for reason, make, said in (("no CUDA device", never, "no CUDA device"), (None, unfit, "no compiler")):
        registry = registry_of("graph", make, reason)
        info = make_runner(*plain, progress, registry).info
        assert info.decoder == "eager"
        assert info.objections == (Objection(decoder="graph", reason=said),)
    registry = registry_of("graph", never, "no CUDA device")
    with pytest.raises(Unsupported, match="no CUDA device"):
        choose("graph", parts, registry)
    assert choose("eager", parts, registry).objections == ()
    with pytest.raises(Unsupported, match="not in this build"):
        choose("warp", parts, registry)
