"""Losses and agreement, against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.train.measure import agreement, losses_by_document, mean_loss, plain_windows, summed_loss
from models.train.network import Qwen3, Shape
from models.train.tokens import Stream

SHAPE = Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, head_dim=16, vocabulary=16, max_positions=64)


def network(seed: int) -> Qwen3:
    torch.manual_seed(seed)
    net = Qwen3(SHAPE)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(30 if parameter.ndim == 2 else 1)
    return net.eval()


def stream(*lengths: int) -> Stream:
    ids = np.random.default_rng(1).integers(0, 16, sum(lengths)).astype(np.uint16)
    return Stream(ids, np.cumsum([0, *lengths[:-1]]).astype(np.int64), 0)


def by_hand(net: Qwen3, ids: list[int], length: int) -> tuple[float, int]:
    nats, count = 0.0, 0
    for at in range(0, len(ids), length):
        window = ids[at : at + length]
        for end in range(1, len(window)):
            with torch.no_grad():
                nats -= float(net(torch.tensor([window[:end]]))[0, -1].log_softmax(-1)[window[end]])
            count += 1
    return nats, count


@pytest.mark.parametrize("size", [2, 12, 13, 24, 25, 31])
def test_sums_every_prediction_once(size: int) -> None:
    net, made = network(1), stream(size)
    nats, count = summed_loss(net, made, 12)
    want, places = by_hand(net, made.ids.tolist(), 12)
    assert count == places
    assert nats == pytest.approx(want, rel=1e-4)
    assert mean_loss(net, made, 12) == pytest.approx(want / places, rel=1e-4)


def test_documents_do_not_see_each_other() -> None:
    net, made = network(1), stream(9, 2, 30)
    bounds = [0, 9, 11, 41]
    for at, (nats, count) in enumerate(losses_by_document(net, made, 12)):
        want, places = by_hand(net, made.ids[bounds[at] : bounds[at + 1]].tolist(), 12)
        assert (nats, count) == (pytest.approx(want, rel=1e-4), places)


def test_agreement_is_whole_with_itself_and_counts_places() -> None:
    one, other, made = network(1), network(2), stream(100)
    assert agreement(one, one, made, 12) == 1.0
    hits = 0
    for windows in plain_windows(made, 12):
        with torch.no_grad():
            hits += int((one(windows).argmax(-1) == other(windows).argmax(-1)).sum())
    assert agreement(one, other, made, 12) == hits / 100
    assert hits < 100


def test_windows_cover_the_stream_in_order() -> None:
    made = stream(205)
    joined = torch.cat([windows.flatten() for windows in plain_windows(made, 12)])
    assert joined.tolist() == made.ids[:205].tolist()[: len(joined)]
    assert len(joined) == 204  # a last window of one id predicts nothing
