"""How far bfloat16's rounding takes the distributions of captured batches from those of the same weights in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from engine.execution.batch_pipeline import BatchPipeline, BatchRow
from engine.execution.graphs.batch import BatchedSteps
from engine.execution.pipeline import StepLaunch
from engine.worker.build import build
from tests.engine.conftest import Drive, Request
from tests.engine.execution.test_eager import MODELS, prompts, settings
from tests.engine.plain_qwen3 import PlainQwen3
from tests.engine.quantized import nothing

pytestmark = pytest.mark.gpu

ROWS = 64
TOKENS = 32


class Watched:
    """The logits of each captured step, and the rows that took a token of it.

    A step in flight is discarded for a row that changes executor. Its logits follow the token that the batch had drawn
    before, and the other executor may draw another one where two are as good as equal.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.taken: dict[int, tuple[BatchRow | None, ...]] = {}  # by number of the step, from 1 on
        self.logits: list[torch.Tensor] = []
        launch, read = BatchedSteps.launch, BatchPipeline._read_step

        def keep(device: BatchedSteps, given: StepLaunch) -> None:
            launch(device, given)
            self.logits.append(device._walk._logits[: given.rows].clone())

        def note(pipeline: BatchPipeline) -> bool:
            number = pipeline._launched - len(pipeline._in_flight) + 1
            moving = pipeline._in_flight[0] if pipeline._in_flight else ()
            live = tuple(None if own is None or own.ended else own for own in moving)
            if came := read(pipeline):
                self.taken[number] = live
            return came

        patch.setattr(BatchedSteps, "launch", keep)
        patch.setattr(BatchPipeline, "_read_step", note)

    def of(self, key: int, length: int) -> dict[int, torch.Tensor]:
        """Logits after each token of a sequence of `length` tokens that such a step fed, by the token's position."""
        found = {}
        for number, rows in self.taken.items():
            for index, own in enumerate(rows):
                if own is not None and own.sequence.key == key and own.since <= number:
                    position = own.first + number - own.since
                    if position < min(own.last, length - 1):
                        found[position] = self.logits[number - 1][index]
        return found


def divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler, float64 [rows] in nats."""
    exact, other = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (exact.exp() * (exact - other)).sum(-1)


def test_a_batch_is_as_near_float32_as_plain_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    request_of: Request,
    drive: Drive,
) -> None:
    """Sixty-four sequences draw tokens together; each distribution that they drew from, given the tokens before it, is
    held against float32's. Operations of torch in bfloat16, which transformers would run, are the measure."""
    watched = Watched(monkeypatch)
    runner = build(settings("bfloat16", device="cuda", max_sequences=ROWS), nothing)
    asked = [
        replace(request_of(prompt, TOKENS, temperature=1.0, seed=key), request_id=str(key))
        for key, prompt in enumerate(prompts(ROWS))
    ]
    answers = drive(runner, asked).answers
    runner.close()
    exact = PlainQwen3(MODELS / "demo", torch.float32, "cpu")
    plain = PlainQwen3(MODELS / "demo", torch.bfloat16, "cuda")
    ours, theirs = [], []
    for key, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = [*request.token_ids, *answer.token_ids]
        found = watched.of(key, len(ids))
        if found:
            at = list(found)
            right = exact.logits(ids)[at]
            ours.append(divergence(right, torch.stack([found[one] for one in at]).cpu()))
            theirs.append(divergence(right, plain.logits(ids)[at].cpu()))
    mine, other = torch.cat(ours), torch.cat(theirs)
    record_property("mean KL of the batch and of torch's bfloat16", (float(mine.mean()), float(other.mean())))
    assert len(mine) > ROWS * TOKENS / 2
    assert mine.mean() <= 1.1 * other.mean()
