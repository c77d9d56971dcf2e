"""Row states on a GPU: what the host says of them, the choice of a token, and the move to the next step."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from engine.kernels import prefill as ops
from engine.kernels import reference, rows
from engine.kernels.build import KernelLibrary
from engine.kernels.launch import Launcher
from engine.sampling.noise import seed_key

pytestmark = pytest.mark.gpu

NAN = float("nan")
CUDA = torch.device("cuda")


def told(library: KernelLibrary, launcher: Launcher, states: rows.RowStates, *changes: list[int]) -> None:
    offsets, at = [], len(changes)
    for one in changes:
        offsets.append(at)
        at += len(one)
    mail = torch.tensor([*offsets, *(word for one in changes for word in one)], dtype=torch.int32, device=CUDA)
    launcher.enqueue((rows.times(rows.change(library, states, mail), len(changes)),))
    torch.cuda.synchronize()


def enter(row: int, token: int, position: int, pages: list[int], last: int = 999, free_from: int = 0) -> list[int]:
    heat = int(torch.tensor(0.5).view(torch.int32))
    sampled = range(100 * row, 100 * row + 16)
    return [rows.ENTER, row, token, position, last, free_from, heat, -7, 5, *range(8), len(pages), *sampled, *pages]


def test_rows_enter_grow_move_and_leave(library: KernelLibrary, launcher: Launcher) -> None:
    states = rows.allocate(5, 200, CUDA)
    many = list(range(1000, 1180))
    told(library, launcher, states, enter(3, 17, 40, [9, 8, 7]), enter(1, 5, 0, many, 3, 2), enter(4, 6, 1, [2]))
    told(library, launcher, states, [rows.PAGES, 3, 3, 2, 6, 5], [rows.LEAVE, 1])
    before = [getattr(states, field.name)[3].clone() for field in fields(states)]
    told(library, launcher, states, [rows.MOVE, 0, 3])
    after = [getattr(states, field.name)[0] for field in fields(states)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert states.position.tolist() == [40, -1, -1, -1, 1]
    assert states.length.tolist() == [41, 0, 0, 0, 2]
    assert states.pages[0, :5].tolist() == [9, 8, 7, 6, 5]
    assert states.pages[1, :180].tolist() == many
    assert states.noise_key[0] == (5 << 32 | 0xFFFFFFF9)
    assert states.stops[4].tolist() == list(range(8))
    assert states.sampled[4].tolist() == list(range(400, 416))
    assert (float(states.temperature[0]), int(states.free_from[1]), int(states.last[1])) == (0.5, 2, 3)


@pytest.mark.parametrize("vocabulary", [97, 4096, 151936])
@pytest.mark.parametrize("slices", [0, 1, 3])
def test_each_row_picks_its_best(library: KernelLibrary, launcher: Launcher, vocabulary: int, slices: int) -> None:
    count = 19
    logits = torch.randn(count, vocabulary, device=CUDA) * 3
    states = rows.allocate(count, 1, CUDA)
    states.position.copy_(torch.arange(count) * 31 + 5)
    states.temperature[::2] = torch.rand(10, device=CUDA) + 0.3
    states.noise_key.copy_(torch.tensor([seed_key(seed) for seed in range(count)]))
    states.position[7] = -1
    bias = None
    if slices == 0:
        logits = logits.bfloat16()
        product = ops.ProductParts(logits)
    else:
        parts = torch.randn(slices, count, vocabulary, device=CUDA)
        parts[-1] = logits - parts[:-1].sum(0)
        bias = torch.randn(vocabulary, device=CUDA)
        product = ops.ProductParts(parts, bias)
        logits = parts.sum(0) + bias
    exact = logits.double()
    logits[5] = NAN if slices == 0 else logits[5]
    best = int(exact[4].argmax())
    states.stops[4] = best  # barred, since it is too early for it
    states.free_from[4] = 1000
    states.temperature[4] = 0
    exact[4, best] = float("-inf")
    launcher.enqueue((rows.pick(library, product, states).alone(),))
    torch.cuda.synchronize()
    found = ~states.best & 0xFFFFFFFF
    noisy = exact / states.temperature.double().clamp(min=1e-30).unsqueeze(1)
    ids = torch.arange(vocabulary, device=CUDA).unsqueeze(0)
    noisy += reference.gumbel(states.noise_key, (states.position + 1).long(), ids)
    scores = torch.where(states.temperature.unsqueeze(1) > 0, noisy, exact)
    assert states.best[7] == 0
    for row in range(count):
        if row == 7 or (row == 5 and slices == 0):
            continue
        assert float(scores[row].max() - scores[row, found[row]]) < 1e-3, row
    if slices == 0:
        assert states.best[5] >> 32 == -1


def test_a_step_is_finished_and_told(library: KernelLibrary, launcher: Launcher) -> None:
    states = rows.allocate(6, 4, CUDA)
    told(library, launcher, states, *(enter(row, 1, 9, [3], last=11 if row == 2 else 99) for row in (0, 1, 2, 4)))
    report = rows.Report(
        torch.tensor([6], dtype=torch.int32, device=CUDA), torch.zeros(4, 6, dtype=torch.int64, pin_memory=True)
    )
    for step, chosen in ((7, (20, 3, 21, 0, 22)), (8, (30, 0, 31, 0, 0))):
        for row, token in enumerate(chosen):
            score = 0x80000000 if row != 4 or step == 7 else 0xFFFFFFFF  # 0.0, or no number
            key = score << 32 | (~token & 0xFFFFFFFF)
            states.best[row] = key - (1 << 64) if row != 3 else 0
        launcher.enqueue((rows.finish(library, states.first(5), report).alone(),))
        torch.cuda.synchronize()
        assert int(report.number) == step
        entries = [int(entry) for entry in report.ring[step % 4]]
        assert [(entry >> 32) & 0xFFFFFFFF for entry in entries[:5]] == [step] * 5
        told_rows = [(entry >> 24 & 0xFF, entry & 0xFFFFFF) for entry in entries[:5]]
        if step == 7:
            assert told_rows == [(0, 20), (1, 3), (0, 21), (128, 0), (0, 22)]  # 3 is a stop token
            assert states.position.tolist() == [10, -1, 10, -1, 10, -1]
            assert states.length.tolist() == [11, 0, 11, 0, 11, 0]
            assert states.token[:3].tolist() == [20, 3, 21]
        else:
            assert told_rows == [(0, 30), (128, 0), (2, 31), (128, 0), (4, 0)]
            assert states.position.tolist() == [11, -1, -1, -1, -1, -1]
        assert not states.best[[0, 2, 4]].any()
