"""The head in two passes on a GPU: the keys, token and score, that the plain head finds, whatever the rows are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from engine.kernels import tokens, two_pass
from engine.kernels.attention import RowPages
from engine.kernels.build import KernelLibrary
from engine.kernels.exchange import Channels
from engine.kernels.launch import Launch, Launcher
from engine.kernels.linear import Normed
from engine.kernels.tokens import Choice
from engine.kernels.weights import Format, Matrix
from engine.model.layers.few_rows import ChainPlan
from engine.sampling.noise import seed_key
from tests.engine.kernels.side_by_side import channels

pytestmark = pytest.mark.gpu

EPS = 1e-6
SHAPES = [(151936, 1024), (32000, 4096), (1003, 896), (8192, 256), (77, 64), (50001, 2048), (32000, 1088)]
TEMPERATURES = (0.0, 0.7, 1e-3, 5.0, 0.0, 1.0, 0.3, 1e-40)


@dataclass(frozen=True)
class Both:
    """One head, and the launches that find its best."""

    plain: Launch
    passes: Launch
    choice: Choice

    def keys(self, launcher: Launcher, launch: Launch) -> torch.Tensor:
        assert self.choice.assured is not None
        self.choice.best.zero_()
        self.choice.assured.zero_()
        launcher.enqueue([launch.alone()])
        return self.choice.best.clone()

    def agree(self, launcher: Launcher) -> torch.Tensor:
        """The keys, once both have found the same ones."""
        wanted, found = self.keys(launcher, self.plain), self.keys(launcher, self.passes)
        live = torch.arange(wanted.shape[0], device="cuda") % 8 != 6  # one row is idle
        assert torch.equal(wanted[live], found[live])
        return found


def both(
    library: KernelLibrary,
    weight: torch.Tensor,
    x: Normed,
    masks: torch.Tensor | None = None,
    channels: Channels | None = None,
) -> Both:
    """`channels`: the head in two passes is that of one rank."""
    rows, columns = weight.shape
    batch = x.residual.shape[0]
    head = Matrix(Format.BF16, rows, columns, weight)
    plan = ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count)
    how = plan.tiling("head", head)
    coarse = two_pass.coarse_copy(head, how.warps)
    passes = plan.two_passes(head, coarse, channels)
    choice = Choice(
        torch.tensor(TEMPERATURES[:batch], device="cuda"),
        torch.tensor([seed_key(seed) for seed in range(batch)], device="cuda"),
        torch.zeros(batch, dtype=torch.int64, device="cuda"),
        assured=torch.zeros(batch, dtype=torch.int32, device="cuda"),
        logits=torch.zeros(batch, rows, device="cuda"),
        masks=masks,
    )
    position = torch.arange(batch, dtype=torch.int32, device="cuda") * 7 + 3
    position[6:7] = -1
    places = RowPages(position, torch.zeros(batch, 1, dtype=torch.int32, device="cuda"))
    return Both(
        tokens.head(library, x, head, choice, places, how),
        tokens.two_pass_head(library, x, passes, choice, places),
        choice,
    )


def stream(batch: int, hidden: int) -> Normed:
    """Rows of very different size."""
    residual = torch.randn(batch, hidden, device="cuda") * torch.logspace(-2, 2, batch, device="cuda").unsqueeze(1)
    gain = torch.rand(hidden, device="cuda") + 0.5
    squares = residual.square().view(batch, -1, 8).sum(-1).contiguous()
    return Normed(residual, (residual * gain).bfloat16(), squares, EPS)


def fill(x: Normed) -> None:
    """Other activations in the same place."""
    other = stream(*x.residual.shape)
    x.residual.copy_(other.residual), x.scaled.copy_(other.scaled), x.squares.copy_(other.squares)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_random_heads(library: KernelLibrary, launcher: Launcher, rows: int, columns: int, batch: int) -> None:
    x = stream(batch, columns)
    weight = (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16()
    one = both(library, weight, x)
    for _ in range(40):
        fill(x)
        one.agree(launcher)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("rows", "columns"), [(151936, 1024), (4099, 4096), (77, 64)])
def test_what_a_mask_bars_is_never_chosen(
    library: KernelLibrary, launcher: Launcher, rows: int, columns: int, batch: int
) -> None:
    x = stream(batch, columns)
    masks = torch.zeros(batch, -(-rows // 32), dtype=torch.int32, device="cuda")
    one = both(library, (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16(), x, masks)
    for share in (1.0, 0.5, 1e-2, 1e-4, 0.0):
        fill(x)
        open_ = torch.rand(batch, rows, device="cuda") < share
        open_[-1, rows // 2] = True  # the only one of its row, in the end
        words = torch.nn.functional.pad(open_, (0, -rows % 32)).view(batch, -1, 32).long()
        masks.copy_((words << torch.arange(32, device="cuda")).sum(-1).int())
        found = one.agree(launcher)
        assert one.choice.logits is not None
        for row in range(batch):
            if row % 8 == 6 or TEMPERATURES[row] > 0:
                continue
            left = one.choice.logits[row].masked_fill(~open_[row], -torch.inf)
            assert int(found[row]) == 0 if not open_[row].any() else ~int(found[row]) & 0xFFFFFFFF == int(left.argmax())
        assert all(open_[row, ~int(key) & 0xFFFFFFFF] for row, key in enumerate(found.tolist()) if key and row % 8 != 6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("rows", "columns"), [(32000, 4096), (1003, 896), (77, 64)])
def test_the_best_of_all_ranks_is_that_of_the_whole_head(
    library: KernelLibrary, launcher: Launcher, rows: int, columns: int, batch: int, ranks: int
) -> None:
    x = stream(batch, columns)
    weight = (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16()
    masks = torch.full((batch, -(-rows // 32)), -1, dtype=torch.int32, device="cuda")
    each = [both(library, weight, x, masks, own) for own in channels(ranks, 1, 1)]
    live = torch.arange(batch, device="cuda") % 8 != 6
    for number in range(40):
        fill(x)
        if number == 20:
            masks.random_(-(1 << 31), 1 << 31)
        wanted = each[0].keys(launcher, each[0].plain)
        found = torch.stack([one.keys(launcher, one.passes) for one in each])
        # As unsigned: the sign flipped, larger keys are larger.
        best = (found ^ -(1 << 63)).amax(0) ^ -(1 << 63)
        assert torch.equal(best[live], wanted[live])


FACTORS = {"tiny": 1e-30, "denormal": 1e-39, "zeros": 0.0}
ADVERSARIES = [*FACTORS, "ties", "all equal", "near ties", "huge norms", "one outlier a row", "infinite", "none"]


def adversarial(kind: str, rows: int, columns: int) -> torch.Tensor:
    weight = torch.randn(rows, columns, device="cuda").bfloat16() * FACTORS.get(kind, 1.0)
    some = torch.randperm(rows, device="cuda")[: rows // 3]
    if kind in ("ties", "near ties"):
        weight[some] = weight[some[0]].clone()
    if kind == "all equal":
        weight[:] = weight[0].clone()
    elif kind == "near ties":  # rows that eight bits do not tell apart
        weight[some, torch.randint(columns, some.shape, device="cuda")] *= 1.01
    elif kind == "huge norms":
        weight[some] *= 1e15
    elif kind == "one outlier a row":
        weight[torch.arange(rows), torch.randint(columns, (rows,))] = 300.0
    elif kind in ("infinite", "none"):
        weight[some[:3], 5] = torch.inf if kind == "infinite" else torch.nan
    return weight


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize(("rows", "columns"), [(32000, 1024), (4099, 4096), (77, 64)])
def test_adversarial_rows(
    library: KernelLibrary, launcher: Launcher, kind: str, rows: int, columns: int, batch: int
) -> None:
    x = stream(batch, columns)
    one = both(library, adversarial(kind, rows, columns), x)
    for _ in range(5):
        fill(x)
        one.agree(launcher)


def spoil(x: Normed, part: slice, value: float) -> None:
    """Fresh activations, these columns of which are that."""
    fill(x)
    x.residual[:, part] = value
    x.scaled[:, part] = value
    x.squares.copy_(x.residual.square().view(8, -1, 8).sum(-1))


@pytest.mark.parametrize("value", [0.0, 1e-39, 1e30, 3e38, float("inf"), float("nan")])
def test_adversarial_activations(library: KernelLibrary, launcher: Launcher, value: float) -> None:
    x = stream(8, 1024)
    one = both(library, torch.randn(20000, 1024, device="cuda").bfloat16(), x)
    for part in (slice(0, 1), slice(0, 1024)):
        spoil(x, part, value)
        one.agree(launcher)


def test_what_it_finds_is_a_token(library: KernelLibrary, launcher: Launcher) -> None:
    x = stream(2, 1024)
    one = both(library, torch.randn(20000, 1024, device="cuda").bfloat16(), x)
    chosen = ~(one.agree(launcher) & 0xFFFFFFFF) & 0xFFFFFFFF
    assert ((chosen >= 0) & (chosen < 20000)).all()


def test_older_cards(older_library: KernelLibrary, launcher: Launcher) -> None:
    x = stream(3, 896)
    weight = torch.randn(30000, 896, device="cuda").bfloat16()
    one = both(older_library, weight, x)
    for _ in range(5):
        fill(x)
        one.agree(launcher)


def test_a_row_does_not_depend_on_the_batch(library: KernelLibrary, launcher: Launcher) -> None:
    weight = torch.randn(40000, 1024, device="cuda").bfloat16()
    x = stream(8, 1024)
    together = both(library, weight, x).agree(launcher)
    first = both(library, weight, replace(x, residual=x.residual[:1], scaled=x.scaled[:1], squares=x.squares[:1]))
    assert torch.equal(first.agree(launcher), together[:1])
