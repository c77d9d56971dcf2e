"""Draws the README's picture: tokens/s of one stream as a share of the roofline, Whippet beside its peers, as SVG.

It writes few shapes, so that the file needs no drawing library and comes out the same to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from scripts.cells import whole
from scripts.figures_gpu import MODELS, OURS, PEERS, peer, runs, served
from scripts.results import Results

CONTEXT = "128"
WIDTH, LABELS, RIGHT = 820, 190, 40
TOP, TITLE, ROW, BAR, BOTTOM = 76, 30, 24, 15, 58
SCALE = (0, 25, 50, 75, 100)  # per cent of the roofline
# Colours of both schemes: GitHub shows the file as an image, which follows the reader's scheme.
STYLE = """
  .paper { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .head { font-size: 16px; font-weight: 600 }
  .title { font-weight: 600 }
  .quiet { fill: #59636e }
  .grid { stroke: #d1d9e0; stroke-width: 1 }
  .roof { stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 4 3 }
  .ours { fill: #0969da }
  .peer { fill: #9aa4af }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .quiet { fill: #9198a1 }
    .grid { stroke: #3d444d }
    .roof { stroke: #f0f6fc }
    .ours { fill: #4493f8 }
    .peer { fill: #656c76 }
  }
"""


@dataclass(frozen=True)
class Bar:
    engine: str
    rate: float  # tokens/s


@dataclass(frozen=True)
class Group:
    """A model's bars, against the rate that its bytes allow."""

    title: str
    roofline: float  # tokens/s
    bars: tuple[Bar, ...]


def groups(results: Results) -> Iterator[Group]:
    """Yields what is drawn, from the files that the tables are made of."""
    ours = runs(results)
    for model, title in MODELS.items():
        run = ours[model]
        engine = run["engine"]["contexts"][CONTEXT]
        bars = [Bar(OURS, served(run, CONTEXT) or 0.0)]
        for name in PEERS:
            found = peer(results, model, name)
            rate = found and found["tokens_per_second"].get(CONTEXT)
            bars += [Bar(name, float(rate))] if rate else []
        yield Group(title, engine["tokens_per_second"] / engine["roofline"], tuple(bars))


def one_stream(results: Results) -> str:
    drawn = list(groups(results))
    bottom = TOP + sum(TITLE + ROW * len(group.bars) for group in drawn)
    height = bottom + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img">',
        "<title>One stream on an H100: tokens per second against the roofline</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        text(20, 30, "One greedy stream on an H100: tokens/s, and share of the roofline", "head"),
        text(
            20,
            52,
            f"{CONTEXT} tokens of context, random weights; Whippet through gRPC, peers offline in other runs.",
            "quiet",
        ),
        *scale(bottom),
    ]
    y = TOP
    for group in drawn:
        parts += [text(20, y + 20, group.title, "title"), roof(group, y)]
        y += TITLE
        for bar in group.bars:
            parts += row(bar, group.roofline, y)
            y += ROW
    return "\n".join([*parts, "</svg>", ""])


def scale(bottom: float) -> Iterator[str]:
    for percent in SCALE:
        x = across(percent / 100)
        shape = "roof" if percent == SCALE[-1] else "grid"
        yield f'<line class="{shape}" x1="{x:g}" y1="{TOP + 6}" x2="{x:g}" y2="{bottom + 4}"/>'
        yield text(x, bottom + 22, f"{percent} %", "quiet", "middle")
    yield text(across(0.5), bottom + 42, "roofline: the bytes that a token must read ÷ 3.07 TB/s", "quiet", "middle")


def roof(group: Group, y: float) -> str:
    return text(across(1) - 8, y + 20, f"roofline {whole(group.roofline)}", "quiet", "end")


def row(bar: Bar, roofline: float, y: float) -> list[str]:
    """Draws a bar with its engine on the left and its rate behind it."""
    width = across(bar.rate / roofline) - across(0)
    kind, middle = ("ours" if bar.engine == OURS else "peer"), y + ROW / 2
    return [
        text(LABELS - 12, middle + 4, bar.engine.removesuffix(", compiled"), "", "end"),
        f'<rect class="{kind}" x="{across(0):g}" y="{middle - BAR / 2:g}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        text(across(0) + width + 8, middle + 4, whole(bar.rate), "title" if bar.engine == OURS else ""),
    ]


def across(share: float) -> float:
    return LABELS + share * (WIDTH - LABELS - RIGHT)


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    shape = f' class="{kind}"' if kind else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{shape} x="{x:.5g}" y="{y:g}"{side}>{escape(words)}</text>'
