"""A regression is told from noise; what cannot be compared is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bench import compare
from bench.__main__ import main
from bench.compare import NONSENSE, REGRESSION, changes, interleave, regressions, samples_of
from bench.result import Result, Samples

ROUNDS = 60


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.result.revision", lambda: "abc")
    monkeypatch.setattr("bench.result.device", lambda: "a CPU")


def machine(seed: int, slower: float) -> Callable[[], Mapping[str, float]]:
    """A side on a machine whose steps differ by a few per cent, and by a lot now and then; `seed` also moves this
    start of the program by as much as two starts of one program differ."""
    chance = random.Random(seed)
    start = chance.uniform(0.995, 1.005)

    def round_() -> dict[str, float]:
        busy = 1.3 if chance.random() < 0.1 else 1.0
        step = 4000 * start * (1 + slower) * chance.lognormvariate(0.0, 0.02) * busy
        return {"step_us": step, "tokens_per_second": 1e6 / step, "first_ms": step / 100}

    return round_


def flagged(seed: int, slower: float) -> bool:
    before, after = interleave(machine(2 * seed, 0.0), machine(2 * seed + 1, slower), ROUNDS)
    step = {"step_us": before["step_us"]}
    return bool(regressions(changes(step, after, paired=True), compare.TOLERANCE))


def test_five_per_cent_are_found_ten_times_of_ten() -> None:
    assert [flagged(seed, 0.05) for seed in range(10)] == [True] * 10


def test_two_runs_of_one_program_are_flagged_never() -> None:
    assert not [seed for seed in range(40) if flagged(seed, 0.0)]


def test_what_got_faster_is_no_regression() -> None:
    before, after = interleave(machine(1, 0.0), machine(2, -0.1), ROUNDS)
    assert [one.verdict() for one in changes(before, after, paired=True)] == ["faster"] * 3


def test_a_rate_is_better_when_it_is_high_and_a_time_when_it_is_low() -> None:
    before = {"a": Samples("tokens/s", (100.0,) * 6), "b": Samples("ms", (100.0,) * 6)}
    after = {"a": Samples("tokens/s", (80.0,) * 6), "b": Samples("ms", (80.0,) * 6), "c": Samples("ms", (1.0,) * 6)}
    assert [(one.name, one.verdict()) for one in changes(before, after, False)] == [("a", "slower"), ("b", "faster")]
    few = {"a": Samples("tokens/s", (100.0,))}
    assert changes(few, few, False)[0].verdict() == "too few rounds"


def test_sides_take_turns_in_beginning() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            order.append(name)
            return dict.fromkeys(compare.UNITS, 1.0)

        return run

    said: list[int] = []
    interleave(side("a"), side("b"), 3, said.append)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert said == [1, 2, 3]


def kept(path: Path, rates: tuple[float, ...], **changed: str) -> str:
    settings = {"model": changed.pop("model", "demo")}
    result = Result("decode", settings, {}, {"rate": Samples("tokens/s", rates)} if rates else {}, "abc", "a CPU")
    path.write_text(json.dumps({**result.record(), **changed}))
    return str(path)


def test_two_files_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = kept(tmp_path / "one.json", (100.0, 101.0, 99.0, 100.5, 99.5))
    two = kept(tmp_path / "two.json", (90.0, 91.0, 89.0, 90.5, 89.5))
    assert main(["compare", one, two, f"--output={tmp_path / 'found'}"]) == REGRESSION
    assert "rate is slower" in capsys.readouterr().out
    assert main(["compare", two, one]) == 0
    assert main(["compare", one, one]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["figures"]["changes"][0]["verdict"] == "slower"
    assert samples_of(json.loads(Path(one).read_text()))["rate"].values[0] == 100.0


@pytest.mark.parametrize("changed", [{"bench": "serve"}, {"device": "another"}, {"model": "other"}])
def test_what_was_not_measured_alike_is_refused(
    changed: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = kept(tmp_path / "one.json", (1.0,) * 5), kept(tmp_path / "two.json", (1.0,) * 5, **changed)
    assert main(["compare", one, two]) == NONSENSE
    assert "whippet bench compare:" in capsys.readouterr().err


def test_a_file_without_rounds_and_one_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = kept(tmp_path / "one.json", ())
    assert main(["compare", one, one]) == NONSENSE
    (tmp_path / "other.json").write_text("[]")
    assert main(["compare", str(tmp_path / "other.json"), one]) == NONSENSE
    assert "cannot show noise" in capsys.readouterr().err


def test_without_a_checkout_there_are_no_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    assert main(["compare", "--before=HEAD"]) == NONSENSE
    assert "needs a checkout" in capsys.readouterr().err


def test_files_and_commits_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.command(["one.json", "--before=HEAD"])
    assert "name two files" in capsys.readouterr().err
