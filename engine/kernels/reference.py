"""What each kernel computes, in plain PyTorch and in the float type of its inputs: the oracle of the kernel tests,
written for reading and for float64, not for speed."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.kernels.attention import PAGE, Heads
from engine.kernels.sampling import BARRED, COUNT, SEEN, SampledRow
from engine.kernels.tokens import FULL, NO_TOKEN, STOPPED
from engine.kernels.two_pass import CoarseCopy, coarse_rows
from engine.sampling.noise import gumbel


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def linear(
    residual: torch.Tensor, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """rms_norm(residual) · Wᵀ + bias."""
    return functional.linear(rms_norm(residual, gain, eps), weight, bias)


def linear_residual(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return residual + functional.linear(x, weight, bias)


def gate_up(
    residual: torch.Tensor, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(gate) · up; gate is the upper half of the product."""
    gate, up = linear(residual, gain, eps, weight, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [..., dim] by angles [2, dim]: cosines, then sines negated in the first half."""
    swapped = torch.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return x * angles[0] + swapped * angles[1]


def attention_row(
    qkv: torch.Tensor,
    heads: Heads,
    gains: tuple[torch.Tensor, torch.Tensor] | None,
    angles: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits one row [rows] into queries [heads, dim] and key [kv_heads, dim], normed and rotated, and value."""
    parts = qkv.view(-1, heads.dim)
    queries, key, value = torch.split(parts, [heads.queries, heads.keys, heads.keys])
    if gains is not None:
        queries, key = rms_norm(queries, gains[0], eps), rms_norm(key, gains[1], eps)
    return rotate(queries, angles), rotate(key, angles), value


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """queries [heads, dim] of the newest token over keys and values [tokens, kv_heads, dim] → [heads, dim]."""
    seen = keys.shape[0] if window is None else min(window, keys.shape[0])
    shared = queries.shape[0] // keys.shape[1]
    keys, values = (part[-seen:].repeat_interleave(shared, 1) for part in (keys, values))
    scores = torch.einsum("hd,thd->ht", queries, keys) * queries.shape[-1] ** -0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def paged(pool: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Gathers a row's first tokens [tokens, kv_heads, dim] from a pool [pages, kv_heads, 16, dim]."""
    held = pool[pages[: -(-tokens // PAGE)].long()]
    return held.transpose(1, 2).flatten(0, 1)[:tokens]


def attend_rows(
    queries: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """queries [rows, heads, dim], each the newest token of a context of `lengths` [rows] tokens in `pages` [rows,
    most], over pools [pages, kv_heads, 16, dim] → [rows, heads, dim]; zeros where a row has no context."""
    out = torch.zeros_like(queries)
    for row, length in enumerate(lengths.tolist()):
        if length > 0:
            keys, values = (paged(pool, pages[row], length).to(queries.dtype) for pool in pools)
            out[row] = attend(queries[row], keys, values, window)
    return out


def join(
    residual: torch.Tensor,
    fresh: torch.Tensor | None,
    fresh_gain: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the residual stream with `fresh` added, normed if there is a gain for it, and the norm of the stream."""
    if fresh is not None:
        fresh = fresh.to(residual.dtype)
        residual = residual + (fresh if fresh_gain is None else rms_norm(fresh, fresh_gain, eps))
    return residual, residual if gain is None else rms_norm(residual, gain, eps)


def turned_heads(
    qkv: torch.Tensor, heads: Heads, gains: torch.Tensor | None, angles: torch.Tensor, eps: float, *, together: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits one row into queries [heads, dim], keys [kv_heads, dim], normed by gains [heads + kv_heads, dim] and
    rotated, and values. `together`: all queries are normed as one, and all keys."""
    queries, keys, values = torch.split(qkv.view(-1, heads.dim), [heads.queries, heads.keys, heads.keys])
    if gains is not None:
        first, rest = gains[: heads.queries].to(qkv.dtype), gains[heads.queries :].to(qkv.dtype)
        if together:
            queries = rms_norm(queries.flatten(), first.flatten(), eps).view_as(queries)
            keys = rms_norm(keys.flatten(), rest.flatten(), eps).view_as(keys)
        else:
            queries, keys = rms_norm(queries, first, eps), rms_norm(keys, rest, eps)
    return rotate(queries, angles), rotate(keys, angles), values


def gate(product: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """activation(gate) · up, of gates then ups."""
    gates, ups = product.chunk(2, -1)
    return (functional.gelu(gates, approximate="tanh") if gelu else functional.silu(gates)) * ups


def plan_rows(
    lengths: list[int], items: int, warps: int, least: int, window: int | None, merged: int = 2
) -> tuple[int, list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
    """Pages of a step for each warp; for each row with a context: row, first page seen, pages, tokens; and where each
    warp starts in the line of all pages, row by row, item by item: entry, item, page, count. `merged`: what merging
    one more run of an item takes, in quarters of a page's reading."""
    entries = []
    for row, length in enumerate(lengths):
        first = max(length - window, 0) // PAGE if window else 0
        if length > 0:
            entries.append((row, first, -(-length // PAGE) - first, length))
    line = [(at, item, page) for at, entry in enumerate(entries) for item in range(items) for page in range(entry[2])]
    longest = max((entry[2] for entry in entries), default=0)
    while 16 * least * least <= merged * longest:  # about the root of pages read for each run merged
        least *= 2
    each = max(least, -(-len(line) // warps))
    starts = [(*line[at], min(each, len(line) - at)) for at in range(0, len(line), each)]
    return each, entries, starts + [(0, 0, 0, 0)] * (warps - len(starts))


def choose(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """argmax of logit (temperature 0) or of logit / temperature + noise. `positions`: where the chosen tokens will
    stand."""
    ids = torch.arange(logits.shape[-1], device=logits.device).unsqueeze(0)
    noisy = logits.double() / temperature.double().clamp(min=1e-30).unsqueeze(1) + gumbel(keys, positions, ids)
    return torch.where(temperature.unsqueeze(1) > 0, noisy, logits.double()).argmax(-1)


def between(coarse: CoarseCopy, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds [batch, rows] of a plain logit. x bfloat16 [batch, columns]; factor [batch]: 1 / root mean square."""
    q, scale, bound = coarse_rows(coarse)
    middle = (x.double() @ q.T) * factor.double().unsqueeze(1) * scale
    apart = bound * x.double().norm(dim=-1, keepdim=True) + 1e-30
    slack = apart * factor.double().unsqueeze(1)
    known = (apart < 1e30) & (middle.abs() + slack < 1e30)
    return (middle - slack).masked_fill(~known, -torch.inf), (middle + slack).masked_fill(~known, torch.inf)


def may_win(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Rows [batch, rows] that are multiplied again, where each block knows the best of all lower bounds."""
    return high >= low.amax(-1, keepdim=True)


def adjusted(
    logits: torch.Tensor, row: SampledRow, position: int, bias: torch.Tensor, marks: torch.Tensor
) -> torch.Tensor:
    """One row's logits [vocabulary] after bias, penalties and barred tokens. `position`: of the chosen token."""
    found = logits + bias if row.biased else logits
    if not row.marked:
        return found
    count = (marks & COUNT).float()
    repetition = torch.tensor(row.repetition, device=logits.device)  # a plain number would divide by its inverse
    weaker = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where((marks & SEEN) != 0, weaker, found)
    found = found - row.presence * (count > 0) - row.frequency * count
    return found.masked_fill((marks & BARRED) != 0, float("-inf")) if position < row.free_from else found


def kept(heat: torch.Tensor, row: SampledRow) -> torch.Tensor:
    """All tokens, by log-weight [vocabulary], as likely as the last that top_k, top_p and min_p must keep."""
    ordered = heat.sort(descending=True).values
    ordered = ordered[: row.top_k] if row.top_k > 0 else ordered
    if row.top_p < 1:
        sums = ordered.double().exp().cumsum(0)
        ordered = ordered[: int((sums < row.top_p * sums[-1]).sum()) + 1]
    return heat >= max(float(ordered[-1]), row.floor)


def scores(
    logits: torch.Tensor, row: SampledRow, position: int, bias: torch.Tensor, marks: torch.Tensor
) -> torch.Tensor | None:
    """Scores [vocabulary] whose maximum is one row's token, if logits are numbers and a token is left."""
    found = adjusted(logits, row, position, bias, marks)
    if not torch.isfinite(logits).all() or not torch.isfinite(found.max()):
        return None
    if row.temperature == 0:
        return found.double()
    heat = (found - found.max()) / torch.tensor(row.heat, device=logits.device)
    ids = torch.arange(heat.shape[0], device=heat.device).unsqueeze(0)
    place = torch.tensor([position], device=heat.device)
    noise = gumbel(torch.tensor([row.noise_key], device=heat.device), place, ids)[0]
    return (heat.double() + noise).masked_fill(~kept(heat, row), float("-inf"))


def sample(logits: torch.Tensor, row: SampledRow, position: int, bias: torch.Tensor, marks: torch.Tensor) -> int | None:
    found = scores(logits, row, position, bias, marks)
    return None if found is None else int(found.argmax())


def verified(
    fed: list[int], chosen: list[int | None], position: int, last: int, stops: tuple[int, ...]
) -> list[tuple[int | None, int]]:
    """The tokens of a verifying step that count, with their flags. `fed`: the newest token, at `position`, and its
    draft; `chosen`: each one's successor, None without a finite score; `last`: where the last may stand."""
    found: list[tuple[int | None, int]] = []
    for at, token in enumerate(chosen):
        flags = NO_TOKEN if token is None else STOPPED if token in stops else 0
        flags |= FULL if position + at + 1 >= last else 0
        found.append((token, flags))
        if flags or fed[at + 1 : at + 2] != [token]:
            return found
    return found


def looked_up(ids: list[int], count: int) -> list[int]:
    """Prompt lookup: what followed the most recent of the longest earlier runs of the newest four to two tokens,
    repeated where that reaches the end; `count` tokens, or none."""
    newest = len(ids) - 1
    for length in (4, 3, 2):
        for end in range(newest - 1, length - 2, -1):
            if ids[end - length + 1 : end + 1] == ids[newest - length + 1 :] and newest + 1 >= length:
                return [ids[end + 1 + at % (newest - end)] for at in range(count)]
    return []
