"""Token streams and the windows cut from them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.train import tokens
from models.train.corpus import Document

FOLDER = Path(__file__).parents[2] / "models" / "demo"
CPU = torch.device("cpu")


def stream(lengths: list[int]) -> tokens.Stream:
    """Ids count up, so that a window's first id tells where it begins."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return tokens.Stream(np.arange(sum(lengths), dtype=np.uint16), starts, sum(lengths))


def test_encode_closes_every_document() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = [f"x{number} = '{'é' * (number % 3)}'\n" for number in range(1100)]
    encoded = tokens.encode(tokenizer, [Document(str(at), text) for at, text in enumerate(texts)])
    bounds = [*encoded.starts.tolist(), len(encoded.ids)]
    for at, text in enumerate(texts):
        ids = encoded.ids[bounds[at] : bounds[at + 1]].tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == text + "<|endoftext|>"
    assert encoded.text_bytes == sum(len(text.encode()) for text in texts)


def test_saved_streams_come_back(tmp_path: Path) -> None:
    written = {split: stream([size, 2]) for size, split in enumerate(tokens.SPLITS, 3)}
    tokens.save(tmp_path / "deep" / "tokens.npz", written)
    read = tokens.load(tmp_path / "deep" / "tokens.npz")
    for split in tokens.SPLITS:
        assert np.array_equal(read[split].ids, written[split].ids)
        assert np.array_equal(read[split].starts, written[split].starts)
        assert read[split].text_bytes == written[split].text_bytes


def test_a_pickled_file_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "tokens.npz", train_ids=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="pickle"):
        tokens.load(tmp_path / "tokens.npz")


@pytest.mark.proof
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 64), st.integers(0, 99))
def test_windows_lie_inside_and_reach_almost_everything(lengths: list[int], length: int, seed: int) -> None:
    made = stream(lengths)
    total = len(made.ids)
    if total < length + 1:
        with pytest.raises(ValueError, match="too few"):
            tokens.window_starts(made, length, np.random.default_rng(seed))
        return
    starts = tokens.window_starts(made, length, np.random.default_rng(seed))
    assert len(starts) >= 1
    assert starts.min() >= 0
    assert starts.max() + length + 1 <= total
    assert len(starts) >= (total - 1) // length - 1


def test_half_of_the_windows_near_a_start_begin_at_it() -> None:
    made = stream([37] * 1500)
    begins = set(made.starts.tolist())
    starts = tokens.window_starts(made, 128, np.random.default_rng(0))
    share = sum(start in begins for start in starts.tolist()) / len(starts)
    assert 0.4 < share < 0.65


def test_a_pass_differs_from_the_next_one() -> None:
    windows = tokens.Windows(stream([5000]), CPU, seed=1)
    first = [windows.take(4, 32)[:, 0].tolist() for _ in range(39)]
    second = [windows.take(4, 32)[:, 0].tolist() for _ in range(39)]
    assert first != second
    assert max(Counter(start for batch in first for start in batch).values()) <= 2


def test_windows_are_slices_and_may_change_length() -> None:
    windows = tokens.Windows(stream([700, 300]), CPU, seed=1)
    for batch, length in ((4, 32), (2, 64), (2, 64), (4, 32)):
        taken = windows.take(batch, length)
        assert taken.shape == (batch, length + 1)
        assert torch.equal(taken, taken[:, :1] + torch.arange(length + 1))


def test_a_batch_larger_than_a_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for a batch"):
        tokens.Windows(stream([100]), CPU, seed=1).take(50, 32)
