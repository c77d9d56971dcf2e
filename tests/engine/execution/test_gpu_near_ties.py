"""What an answer owes to what runs beside it on a GPU: a token where two are equally good but for rounding, no more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.api import GenerationRequest
from engine.worker.build import build, prepare
from tests.engine.conftest import Drive, Request
from tests.engine.execution.test_eager import prompts, settings
from tests.engine.judged import judge
from tests.engine.quantized import nothing

pytestmark = pytest.mark.gpu

TOKENS = 32
TIGHT = 3  # pages a row, where each begins with two to four and needs up to six
GAPS = {"float32": 1e-3, "bfloat16": 0.15, "awq": 0.15, "int8": 0.15}  # logits: what rounding in every layer may change


@pytest.mark.parametrize("form", GAPS)
def test_answers_among_many_differ_at_near_ties_alone(form: str, request_of: Request, drive: Drive) -> None:
    """Each answer among 2 to 64, preempted and gone on with where pages are scarce, up to its first difference from the
    same one alone, is held against the logits that the same weights give in float32 on a CPU: neither token may be
    behind the best by more than rounding."""
    runner = build(settings(form, device="cuda", max_sequences=64), nothing)
    exact = prepare(settings(form, dtype="float32", max_sequences=1, kv_bytes=16 << 20), nothing).parts
    requests: list[GenerationRequest] = []
    for index, prompt in enumerate(prompts(64)):
        sampling = {} if index % 2 else {"temperature": 0.9, "seed": index}
        requests.append(replace(request_of(prompt, TOKENS, **sampling), request_id=str(index)))
    alone = [drive(runner, [request]).answers[0].token_ids for request in requests]
    for count, pages in ((2, None), (8, None), (16, None), (64, None), (8, TIGHT * 8), (64, TIGHT * 64)):
        groups = [requests[at : at + count] for at in range(0, 64, count)]
        driven = [drive(runner, group, pages=pages) for group in groups]
        assert any(one.preemptions for one in driven) == bool(pages)  # eight short prompts may have pages enough
        among = [one.token_ids for group in driven for one in group.answers]
        for request, one, other in zip(requests, alone, among, strict=True):
            at = next((at for at in range(TOKENS) if one[at : at + 1] != other[at : at + 1]), None)
            if at is not None:
                judge(exact, request, one[: at + 1], GAPS[form])
                judge(exact, request, other[: at + 1], GAPS[form])
    runner.close()
