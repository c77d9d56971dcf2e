"""Recorded steps: what is kept, what is written when and for whom; and that they can be done again."""

from __future__ import annotations

import json
import logging
import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import EngineFailed
from engine.fake import FakeRunner, Fault, plain_request
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, Runner, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceTable, readmission
from engine.settings import EngineSettings, FakeSettings
from engine.worker import replay
from engine.worker.build import build
from engine.worker.offers import PLAIN_TRIAL
from engine.worker.recording import (
    MOST_FILES,
    HeldSequence,
    NoRecording,
    Recording,
    StepRecorder,
    read_recording,
)

pytestmark = pytest.mark.product


class Recorded:
    """A scheduler with shared prefixes over a recorded runner, driven by hand."""

    def __init__(self, settings: EngineSettings, runner: Runner, folder: Path, most_steps: int = 256) -> None:
        self.runner, info = runner, runner.info
        self.pool = PagePool(info.total_pages)
        limits = Limits(
            max_sequences=info.max_sequences,
            max_batch_tokens=40,
            max_context=info.max_context,
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        self.scheduler = Scheduler(limits, self.pool, prefixes=PrefixIndex(self.pool, b"model"))
        page_bytes = runner.pages.layout.token_bytes * 16
        self.recorder = StepRecorder(settings, info, page_bytes, folder, most_steps)
        self.truth = SequenceTable()
        self.fault: Exception | None = None
        self.key = 0

    def submit(self, ids: tuple[int, ...], output: int = 20, **changes: Any) -> None:
        self.key += 1
        request = plain_request(ids, output, **{"arrived_at": float(self.key), **changes})
        self.scheduler.admit(Sequence(request, list(ids), key=self.key))

    def step(self) -> bool:
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return False
        try:
            result = self.runner.run(plan)
        except Exception as fault:
            self.fault = fault
            self.recorder.add(plan, None)
            self.scheduler.fail(plan)
            return False
        self.recorder.add(plan, result)
        self.truth.apply(plan)
        self.truth.append(plan.rows, result.rows)
        self.scheduler.commit(plan, result, 0.0)
        return True

    def converse(self, chance: random.Random, steps: int) -> None:
        """Prompts that begin alike, come and go, are paused, and throw each other out."""
        head = tuple(chance.randrange(1, 250) for _ in range(40))
        for _ in range(steps):
            if chance.random() < 0.3:
                tail = tuple(chance.randrange(1, 250) for _ in range(chance.randrange(1, 30)))
                self.submit((*head[: chance.choice((0, 16, 40))], *tail), chance.choice((3, 60)))
            if chance.random() < 0.1 and self.key:
                chance.choice((self.scheduler.cancel, self.scheduler.pause, self.scheduler.resume))(
                    chance.randrange(1, self.key + 1)
                )
            self.step()


def fake_settings(**fake: Any) -> EngineSettings:
    return EngineSettings(
        model="", kind="fake", max_sequences=3, fake=FakeSettings(**{"total_pages": 24, "max_context": 200, **fake})
    )


def fake(folder: Path, most_steps: int = 256, **changes: Any) -> Recorded:
    settings = fake_settings(**changes)
    return Recorded(settings, FakeRunner(settings), folder, most_steps)


def outcome(recording: Recording, runner: Runner) -> replay.ReplayOutcome:
    """Of the file's bytes, not of the objects that they were made from."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(recording), type=Recording)
    return replay.replay(again, runner)


def recording_of(engine: Recorded) -> Recording:
    path = engine.recorder.write(engine.fault or EngineFailed("asked for by a test"))
    assert path is not None
    return read_recording(path)


@pytest.mark.parametrize("ids", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_the_ring_is_bounded_and_what_left_it_is_folded(seed: int, ids: int, tmp_path: Path) -> None:
    engine = fake(tmp_path, 8, tokens_per_step=ids)
    engine.converse(random.Random(seed), 60)
    recording = recording_of(engine)
    assert len(recording.steps) == 8
    assert recording.first > 20
    table = SequenceTable()
    for one in recording.held:
        row = Row(one.admitted.key, one.admitted.slot, 0, 1, False, 0, one.pages)
        table.apply(StepPlan((row,) if one.pages else (), (one.admitted,)))
    for step in recording.steps:
        assert step.result is not None
        table.apply(step.plan)
        table.append(step.plan.rows, step.result.rows)
    found, truth = (
        {state.key: HeldSequence(readmission(state), tuple(state.pages)) for state in side.states()}
        for side in (table, engine.truth)
    )
    assert found == truth
    assert outcome(recording, FakeRunner(fake_settings(tokens_per_step=ids))) == replay.ReplayOutcome(8, None)


def test_a_file_is_for_its_owner_and_names_no_model_and_no_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake(tmp_path)
    engine.submit((1, 2, 3))
    engine.step()
    with caplog.at_level(logging.ERROR):
        path = engine.recorder.write(EngineFailed("asked for"))
    assert path is not None
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(path) in caplog.text
    recording = read_recording(path)
    assert recording.fault == "EngineFailed: asked for"
    assert (recording.settings.model, recording.settings.shared_tier) == ("", None)
    assert (len(recording.steps), recording.first) == (1, 0)


def test_files_of_one_process_are_few_and_each_begins_behind_the_last(tmp_path: Path) -> None:
    engine = fake(tmp_path)
    engine.submit((1, 2, 3), 100)
    for count in range(MOST_FILES):
        assert engine.step()
        assert engine.step()
        assert recording_of(engine).first == 2 * count
    assert engine.recorder.write(EngineFailed("one more")) is None
    assert len(list(tmp_path.iterdir())) == MOST_FILES


def test_a_folder_that_takes_nothing_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = fake(tmp_path / "absent")
    assert engine.recorder.write(EngineFailed("asked for")) is None
    assert "could not be written" in caplog.text


@pytest.mark.parametrize("most_steps", [256, 5])
def test_a_fault_of_the_fake_comes_again(most_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = fake(tmp_path, most_steps, faults=True)
    engine.submit((7, 8, 9), 100)
    engine.submit((0, Fault.RAISE, 12), 100)
    while engine.step():
        pass
    assert isinstance(engine.fault, EngineFailed)
    path = engine.recorder.write(engine.fault)
    count = len(read_recording(path).steps) if path else 0
    assert 5 <= count <= most_steps
    assert replay.main([str(path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "recorded fault: EngineFailed: as asked"
    assert said[1] == f"{count - 1} steps are equal; step {12}: raises EngineFailed: as asked"


def test_what_was_written_to_a_file_is_found_different(tmp_path: Path) -> None:
    engine = fake(tmp_path)
    engine.submit((7, 8, 9), 30)
    while engine.step():
        pass
    recording = recording_of(engine)
    steps = list(recording.steps)
    result = steps[9].result
    assert result is not None
    steps[9] = replace_result(steps[9], {1: (result.rows[1].token_ids[0] ^ 1,)})
    wrong = msgspec.structs.replace(recording, steps=tuple(steps))
    found = outcome(wrong, FakeRunner(fake_settings()))
    assert (found.steps, (found.difference or "").startswith("sequence 1, after 12 tokens")) == (9, True)
    plan = steps[4].plan
    broken = msgspec.structs.replace(plan, rows=(msgspec.structs.replace(plan.rows[0], start=2, count=4),))
    wrong = msgspec.structs.replace(
        recording, steps=(*recording.steps[:4], msgspec.structs.replace(steps[4], plan=broken))
    )
    found = outcome(wrong, FakeRunner(fake_settings()))
    assert (found.steps, (found.difference or "").startswith("the plan breaks a rule")) == (4, True)


def replace_result(step: Any, ids: dict[int, tuple[int, ...]]) -> Any:
    rows = {key: msgspec.structs.replace(row, token_ids=ids[key]) for key, row in step.result.rows.items()}
    return msgspec.structs.replace(step, result=StepResult(rows))


def test_what_is_no_recording_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(NoRecording):
        read_recording(path)
    for name in (path, tmp_path / "absent"):
        assert replay.main([str(name)]) == 2
        assert len(capsys.readouterr().out.splitlines()) == 1
    recording = recording_of(fake(tmp_path))
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(recording, version=99)))
    with pytest.raises(NoRecording, match="99"):
        read_recording(path)
    settings = replace(recording.settings, kind="model")
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(recording, settings=settings)))
    assert replay.main([str(path)]) == 2
    assert "--model" in capsys.readouterr().out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(PLAIN_TRIAL)))
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, tokens, dim, float32
    return EngineSettings(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        threads=1,
        max_sequences=3,
        max_context=160,
        kv_bytes=11 * page_bytes,
    )


@pytest.mark.parametrize(("seed", "most_steps"), [(0, 256), (1, 256), (2, 30), (3, 6)])
def test_steps_of_a_real_model_come_out_the_same(
    seed: int, most_steps: int, model: EngineSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = build(model, lambda phase, done, total: None)
    engine = Recorded(model, runner, tmp_path, most_steps)
    engine.converse(random.Random(seed), 120)
    assert engine.scheduler.load.preemptions > 0
    path = engine.recorder.write(EngineFailed("asked for"))
    count = len(read_recording(path).steps) if path else 0
    assert replay.main([str(path), "--model", model.model]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{count} steps, all equal"


def test_a_fault_of_a_real_model_comes_again(
    model: EngineSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Recorded(model, build(model, lambda phase, done, total: None), tmp_path)
    engine.submit(tuple(range(30)), 9)
    engine.submit((5, 1000), 9)  # which no vocabulary of 320 has
    while engine.step():
        pass
    assert engine.fault is not None
    path = engine.recorder.write(engine.fault)
    assert replay.main([str(path), "--model", model.model]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1].endswith("raises EngineFailed: a token id lies outside the vocabulary")
    )
