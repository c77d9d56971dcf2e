"""Decode attention on a GPU, against float64: head layouts, page borders, splits, windows, and slots that hold NaN."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import reference
from engine.kernels.attention import AttentionOp, Embedding, Heads, LayerAttention, RowPages, scratch
from engine.kernels.build import OVERLAP_CAPABILITY, KernelLibrary
from engine.kernels.launch import Launcher
from tests.engine.kernels.kept import E4M3, KEPT, as_kept, read

pytestmark = pytest.mark.gpu

EPS = 1e-6
POSITIONS = [
    [0, 1, 15, 16, 17, 31, 32, 33],
    [-1, 5, 127, 128, 129, -1, 255, 256],
    [1000, 1023, 1024, 1025, 2047, 2048, 2049, 3000],
    [4095, 4096, 4097, 8191, 8192, 8193, 12345, 0],
]
HEADS = [
    Heads(16, 8, 128, True),
    Heads(32, 8, 128, False),
    Heads(28, 4, 128, False),
    Heads(14, 2, 64, False),
    Heads(8, 8, 64, True),
    Heads(24, 2, 96, False),
    Heads(2, 1, 32, True),
    Heads(8, 1, 256, False),
]


class Case:
    """Random rows over a shuffled pool whose unwritten slots are NaN."""

    def __init__(
        self, heads: Heads, positions: list[int], gain: float = 1.0, kept: torch.dtype = torch.bfloat16
    ) -> None:
        self.heads, self.positions, self.kept = heads, positions, kept
        batch, most = len(positions), max(positions) // 16 + 1
        pages = torch.randperm(batch * most + 3, device="cuda")[: batch * most].view(batch, most)
        self.places = RowPages(
            torch.tensor(positions, dtype=torch.int32, device="cuda"), pages.to(torch.int32).contiguous()
        )
        size = (batch * most + 3, heads.keys, 16, heads.dim)
        self.pool = as_kept(torch.full((2, *size), float("nan"), device="cuda"), kept)
        for row, position in enumerate(positions):
            for token in range(0, max(position, 0), 16):
                count = min(16, position - token)
                fresh = torch.randn(2, heads.keys, count, heads.dim, device="cuda").bfloat16()
                self.pool[:, pages[row, token // 16], :, :count] = as_kept(fresh, kept)
        self.qkv = torch.randn(batch, heads.rows, device="cuda")
        self.gains = None
        if heads.norm:
            self.gains = tuple(torch.rand(heads.dim, device="cuda") * gain + 0.5 for _ in range(2))
        angles = torch.rand(max(positions) + 1, heads.dim // 2, device="cuda") * 6.3
        cos, sin = angles.cos(), angles.sin()
        self.angles = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).contiguous()

    def run(
        self,
        library: KernelLibrary,
        launcher: Launcher,
        window: int | None,
        *,
        times: int = 1,
        blocks_at_once: int = 0,
        slots: int = 0,
    ) -> torch.Tensor:
        heads, batch = self.heads, len(self.positions)
        held = scratch(heads, batch, torch.device("cuda"))
        held.out.fill_(0x7FC00000)  # NaN, of no launch
        held.sums.fill_(0x7FC00000)
        query_gain, key_gain = self.gains or (None, None)
        layer = LayerAttention(self.pool[0], self.pool[1], query_gain, key_gain, window)
        longest = max(self.positions)
        embedding = Embedding(self.angles, EPS)
        op = AttentionOp(
            library, heads, self.places, embedding, held, blocks_at_once, longest, bulk=slots > 0, slots=slots
        )
        out = torch.full((batch, heads.queries * heads.dim), float("nan"), device="cuda", dtype=torch.bfloat16)
        launcher.enqueue([op.prepare(layer, self.qkv, out)] * times)
        assert not held.arrivals.any()
        return out.view(batch, heads.queries, heads.dim)

    def expected(self, row: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of one row: the new key, the new value and the result, float64 over keys and values as they are kept. As fp8
        the new ones are read from the pool, where they must be: which of two neighbours a key is, float32 decides."""
        gains = None if self.gains is None else (self.gains[0].double(), self.gains[1].double())
        position = self.positions[row]
        queries, key, value = reference.attention_row(
            self.qkv[row].double(), self.heads, gains, self.angles[position].double(), EPS
        )
        pages = self.places.pages[row]
        held = [read(reference.paged(part, pages, position + 1)).double() for part in self.pool]
        if self.kept != E4M3:
            held[0][-1], held[1][-1] = key.bfloat16().double(), value.bfloat16().double()
        return key, value, reference.attend(queries.bfloat16().double(), held[0], held[1], window)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    distance = (found.double() - expected).norm() / expected.norm()
    return bool(distance < tolerance)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [None, 100, 1024])
@pytest.mark.parametrize("positions", POSITIONS, ids=["short", "idle", "long", "longer"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(
    library: KernelLibrary,
    launcher: Launcher,
    heads: Heads,
    positions: list[int],
    window: int | None,
    kept: torch.dtype,
) -> None:
    case = Case(heads, positions, kept=kept)
    before = case.pool.clone()
    out = case.run(library, launcher, window)
    expected = [case.expected(row, window) if position >= 0 else None for row, position in enumerate(positions)]
    written = torch.zeros(case.pool.shape[1], 16, dtype=torch.bool, device="cuda")
    for row, wanted in enumerate(expected):
        if wanted is None:
            assert out[row].isnan().all()  # an idle row is left alone
            continue
        key, value, result = wanted
        assert close(out[row], result, 6e-3), (positions[row], window)
        page, slot = int(case.places.pages[row, positions[row] // 16]), positions[row] % 16
        written[page, slot] = True
        fresh = read(case.pool[:, page, :, slot])
        if kept == E4M3:
            assert bool(((fresh[0].double() - key).abs() <= key.abs() * 2**-4 * 1.001 + 2**-10).all())
        else:
            assert close(fresh[0], key, 3e-3)
        assert torch.equal(fresh[1], read(as_kept(value.float(), kept)))
    same = case.pool.view(torch.uint8) == before.view(torch.uint8)
    assert same.transpose(2, 3)[:, ~written].all()  # nothing else was touched


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kept", KEPT)
def test_as_older_gpus_have_it(
    library: KernelLibrary, older_library: KernelLibrary, launcher: Launcher, heads: Heads, kept: torch.dtype
) -> None:
    """The same bits, also where another instruction makes f16 of e4m3."""
    positions = [5, 127, 300, 3000]
    case = Case(heads, positions, kept=kept)
    found = [case.run(one, launcher, None, blocks_at_once=1 << 20) for one in (library, older_library)]
    assert torch.equal(*found)


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_large_head_norms(library: KernelLibrary, launcher: Launcher, heads: Heads) -> None:
    case = Case(heads, POSITIONS[2], gain=96.0)
    out = case.run(library, launcher, None)
    for row in range(8):
        assert close(out[row], case.expected(row, None)[2], 2e-2)


def test_a_row_does_not_depend_on_the_batch(library: KernelLibrary, launcher: Launcher) -> None:
    case = Case(HEADS[0], POSITIONS[2])
    together = case.run(library, launcher, None)
    for row in range(8):
        alone = Case(HEADS[0], [case.positions[row]])
        alone.places = RowPages(
            case.places.position[row : row + 1].contiguous(), case.places.pages[row : row + 1].contiguous()
        )
        alone.pool, alone.gains, alone.angles = case.pool, case.gains, case.angles
        alone.qkv = case.qkv[row : row + 1].contiguous()
        assert torch.equal(alone.run(library, launcher, None)[0], together[row])


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("positions", [[8193], [700, 130], [0, 3000]], ids=str)
def test_both_merges_agree(library: KernelLibrary, launcher: Launcher, positions: list[int], kept: torch.dtype) -> None:
    """Waiting for the other splits, or merging in whichever block comes last: the same bits, launch after launch."""
    case = Case(HEADS[0], positions, kept=kept)
    first = case.run(library, launcher, None)
    for row in range(len(positions)):
        assert close(first[row], case.expected(row, None)[2], 6e-3)
    for _ in range(20):
        assert torch.equal(case.run(library, launcher, None, times=3), first)
        assert torch.equal(case.run(library, launcher, None, times=3, blocks_at_once=1 << 20), first)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [None, 1000, 3000])
@pytest.mark.parametrize("positions", [[8193], [2303], [5000, 2100, -1, 3]], ids=str)
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[2], HEADS[3], HEADS[5], HEADS[-1]], ids=str)
def test_pages_in_shared_memory_agree(
    library: KernelLibrary,
    launcher: Launcher,
    heads: Heads,
    positions: list[int],
    window: int | None,
    kept: torch.dtype,
) -> None:
    """Bulk copies or registers: the same bits, however few places there are."""
    if torch.cuda.get_device_capability() < OVERLAP_CAPABILITY:
        pytest.skip("needs the copy engine of compute capability 9.0")
    case = Case(heads, positions, kept=kept)
    first = case.run(library, launcher, window)
    live = [row for row, position in enumerate(positions) if position >= 0]
    for slots in (1, 2):
        for _ in range(5):
            found = case.run(library, launcher, window, times=3, blocks_at_once=1 << 20, slots=slots)
            assert torch.equal(found[live], first[live])
