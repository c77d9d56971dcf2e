"""The logits that top_k needs, by the head in two passes, on a GPU: they draw what all logits draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import sampling, tokens, two_pass
from engine.kernels.attention import RowPages
from engine.kernels.build import KernelLibrary
from engine.kernels.launch import Launch, Launcher
from engine.kernels.linear import Normed
from engine.kernels.sampling import SampledRow
from engine.kernels.tokens import Choice
from engine.kernels.weights import Format, Matrix
from engine.model.layers.few_rows import ChainPlan
from engine.sampling.noise import seed_key
from tests.engine.kernels.test_gpu_two_pass import ADVERSARIES, adversarial, fill, spoil, stream

pytestmark = pytest.mark.gpu

SHAPES = [(151936, 1024), (32000, 4096), (1003, 896), (77, 64)]
ROWS = [
    SampledRow(temperature=0.8, top_k=50, top_p=0.95),
    SampledRow(temperature=1.0, top_k=1),
    SampledRow(temperature=1.5, top_k=100),
    SampledRow(temperature=0.3, top_k=20, top_p=0.5),
    SampledRow(temperature=5.0, top_k=64, min_p=0.05),
    SampledRow(temperature=1e-3, top_k=7, top_p=0.9, min_p=0.1),
    SampledRow(temperature=1.0, top_k=40),  # idle
    SampledRow(temperature=0.7, top_k=2, top_p=0.999),
]


class Both:
    """One head, the stages behind it, and what they draw."""

    def __init__(
        self, library: KernelLibrary, weight: torch.Tensor, x: Normed, masks: torch.Tensor | None = None
    ) -> None:
        rows, columns = weight.shape
        batch = x.residual.shape[0]
        matrix = Matrix(Format.BF16, rows, columns, weight)
        plan = ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count)
        how = plan.tiling("head", matrix)
        passes = plan.two_passes(matrix, two_pass.coarse_copy(matrix, how.warps))
        self.state = sampling.allocate(batch, rows, torch.device("cuda"))
        self.position = torch.arange(batch, dtype=torch.int32, device="cuda") * 7 + 3
        self.position[6:7] = -1
        self.live = self.position >= 0
        for at in range(batch):
            self.state.place(at, replace(ROWS[at], noise_key=seed_key(at)))
        self.choice = Choice(
            self.state.heat,
            torch.zeros(batch, dtype=torch.int64, device="cuda"),
            torch.zeros(batch, dtype=torch.int64, device="cuda"),
            logits=self.state.logits,
            masks=masks,
        )
        places = RowPages(self.position, torch.zeros(batch, 1, dtype=torch.int32, device="cuda"))
        self.stages = sampling.sampling(library, self.state, self.choice, places)
        self.plain = tokens.head(library, x, matrix, self.choice, places, how)
        self.passes = sampling.two_pass_top(library, x, passes, self.state, masks, places)

    def keys(self, launcher: Launcher, launch: Launch) -> torch.Tensor:
        self.choice.best.zero_()
        launcher.enqueue([launch.alone(), *self.stages])
        return self.choice.best.clone()

    def agree(self, launcher: Launcher) -> tuple[torch.Tensor, torch.Tensor]:
        """All logits, and those of the two passes; the keys drawn are the same."""
        wanted = self.keys(launcher, self.plain)
        logits = self.state.logits.clone()
        self.state.logits.fill_(123.0)
        found = self.keys(launcher, self.passes)
        assert torch.equal(wanted[self.live], found[self.live])
        return logits, self.state.logits


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_random_heads(library: KernelLibrary, launcher: Launcher, rows: int, columns: int, batch: int) -> None:
    x = stream(batch, columns)
    one = Both(library, (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16(), x)
    for _ in range(20):
        fill(x)
        logits, found = one.agree(launcher)
        there = ~found.isnan() & one.live.unsqueeze(1)
        assert torch.equal(logits[there], found[there])  # bit for bit, or left out
        if rows > 100_000:
            assert there.sum(1).max() < rows // 20
        for at in range(batch):
            if one.live[at]:
                kept = logits[at].topk(min(ROWS[at].top_k, rows)).values[-1]
                assert there[at][logits[at] >= kept].all()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize(("rows", "columns"), [(32000, 1024), (77, 64)])
def test_adversarial_rows(
    library: KernelLibrary, launcher: Launcher, kind: str, rows: int, columns: int, batch: int
) -> None:
    x = stream(batch, columns)
    one = Both(library, adversarial(kind, rows, columns), x)
    for _ in range(3):
        fill(x)
        one.agree(launcher)


@pytest.mark.parametrize("value", [0.0, 1e30, 3e38, float("inf"), float("nan")])
def test_adversarial_activations(library: KernelLibrary, launcher: Launcher, value: float) -> None:
    x = stream(8, 1024)
    one = Both(library, torch.randn(20000, 1024, device="cuda").bfloat16(), x)
    for part in (slice(0, 1), slice(0, 1024)):
        spoil(x, part, value)
        one.agree(launcher)


@pytest.mark.parametrize("open_share", [0.5, 1e-3, 1e-5])
def test_masked_rows(library: KernelLibrary, launcher: Launcher, open_share: float) -> None:
    rows = 40000
    x = stream(2, 1024)
    allowed = torch.rand(2, rows // 32, 32, device="cuda") < open_share
    allowed[:, 0, 0] = True
    bits = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32, device="cuda")
    masks = (allowed * bits).sum(-1, dtype=torch.int32)
    one = Both(library, torch.randn(rows, 1024, device="cuda").bfloat16(), x, masks)
    for _ in range(3):
        fill(x)
        one.agree(launcher)
