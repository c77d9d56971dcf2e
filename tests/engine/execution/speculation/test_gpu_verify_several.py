"""Several sequences in one captured round on a GPU: each has the ids of no speculation, whoever stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.execution.runner import ModelRunner
from engine.execution.speculation import verify_executor as executor
from engine.execution.speculation.verify_executor import SEVERAL, CapturedSpeculation
from engine.execution.speculation.verifying import SeveralPolicy
from tests.engine.execution.graphs.test_gpu_decode import save, texts
from tests.engine.execution.speculation.test_gpu_verify_executor import (
    SAMPLINGS,
    answers,
    quantized,
    request,
    started,
)

pytestmark = pytest.mark.gpu

SIZES = 5, 40, 130, 16
LENGTH = 200  # tokens of the first: when the second has its first one, the rounds before it have brought 133 at most


@dataclass(frozen=True)
class Rounds:
    """A runner whose rows go on together whenever they may."""

    runner: ModelRunner
    executor: CapturedSpeculation

    def read(self) -> int:
        """Rounds of several sequences."""
        return sum(self.executor.pipelines[most].read.total() for most in SEVERAL)


@pytest.fixture(scope="module")
def eager_to() -> Iterator[None]:
    """Rounds pay always."""
    with pytest.MonkeyPatch.context() as patch:
        for doubt in ("_may_pay", "_pays", "_won_back"):
            patch.setattr(SeveralPolicy, doubt, lambda *_: True)
        patch.setattr(executor, "_TURN", 0.0)  # steps of models this small would not be waited for
        yield


def begun(folder: Path, draft: Path | None = None, **changes: Any) -> Rounds:
    runner, executor = started(folder, draft, max_sequences=4, **changes)
    return Rounds(runner, executor)


@pytest.fixture(scope="module", params=["lookup", "the target itself", "another model"])
def rounds(
    request: pytest.FixtureRequest, eager_to: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rounds]:
    place = Path(tmp_path_factory.mktemp("model"))
    folder, other = save(place / "qwen3", "qwen3"), save(place / "llama", "llama")
    made = begun(folder, {"the target itself": folder, "another model": other}.get(request.param))
    yield made
    made.runner.close()


def compare(rounds: Rounds, count: int, **sampling: Any) -> int:
    """The ids of so many that end apart, with and without; rounds that they were in."""
    asked = [request(3 * text, LENGTH + 40 * at, **sampling) for at, text in enumerate(texts(SIZES[:count]))]
    runner, before = rounds.runner, rounds.read()
    runner.set_optimization("speculation", False)
    plain = answers(runner, asked, at_once=4)
    assert all(told.proposed == 0 for told in plain)
    for flips in (0, 3):
        runner.set_optimization("speculation", True)
        found = answers(runner, asked, flips, at_once=4)
        for one, other in zip(found, plain, strict=True):
            assert one.ids == other.ids
            assert one.accepted <= one.proposed
    runner.set_optimization("speculation", True)
    return rounds.read() - before


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_ids_are_those_of_no_speculation(rounds: Rounds, sampling: dict[str, Any], count: int) -> None:
    read = compare(rounds, count, **sampling)
    assert (read == 0) == ("repetition_penalty" in sampling)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_ids_are_those_of_no_speculation_in_other_formats(
    eager_to: None, form: str, drafted: bool, tmp_path: Path
) -> None:
    folder, changes = quantized(tmp_path / "model", form)
    rounds = begun(folder, folder if drafted else None, **changes)
    for count in (2, 4):
        for sampling in SAMPLINGS[:2]:
            assert compare(rounds, count, **sampling) > 0
    rounds.runner.close()


def test_stops_and_riders(rounds: Rounds) -> None:
    """One stops in an accepted run, one asks for no drafts, one for one token each; a fifth takes the place of the
    first to end."""
    asked = [request(3 * text, 200) for text in texts((*SIZES, 9))]
    asked[1], asked[2] = replace(asked[1], draft_limit=0), replace(asked[2], draft_limit=1)
    rounds.runner.set_optimization("speculation", False)
    plain = answers(rounds.runner, asked, at_once=4)
    stop = plain[0].ids[60]
    asked[0] = replace(asked[0], stopping=replace(asked[0].stopping, stop_token_ids=(stop,)))
    rounds.runner.set_optimization("speculation", True)
    found = answers(rounds.runner, asked, at_once=4)
    assert found[0].ids == plain[0].ids[: plain[0].ids.index(stop) + 1]
    assert [told.ids for told in found[1:]] == [told.ids for told in plain[1:]]
    assert found[1].proposed == 0


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_draft_model_that_is_the_target_is_mostly_right(
    eager_to: None, count: int, sampling: dict[str, Any], tmp_path: Path
) -> None:
    """Each draws with what is its own; after prompts, plain steps and neighbours that come and go."""
    folder = save(tmp_path / "qwen3", "qwen3")
    rounds = begun(folder, folder)
    for flips in (0, 7):
        asked = [
            request(3 * text, LENGTH + 20 * at, **{**sampling, **({"seed": at} if sampling else {})})
            for at, text in enumerate(texts(SIZES[:count]))
        ]
        rounds.runner.set_optimization("speculation", True)
        found = answers(rounds.runner, asked, flips, at_once=4)
        proposed, accepted = sum(one.proposed for one in found), sum(one.accepted for one in found)
        # As for one: near-ties fall otherwise where its keys were computed in other company.
        assert accepted > 0.85 * proposed > 0, (accepted, proposed, flips)
    assert rounds.read() > 0
    rounds.runner.close()
