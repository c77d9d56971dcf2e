"""Renders a folder of results as one page: HTML with its pictures inside, nothing foreign; and PNGs where matplotlib
is.

whippet bench report whippet-bench
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result import load

Lines = Mapping[str, Sequence[float | None]]
_WIDE, _HIGH, _LEFT, _FOOT = 540, 260, 64, 46
# Distinct for readers who see colours otherwise too; each line has its own dashes as well.
_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#6e7781")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4")


@dataclass(frozen=True, slots=True)
class Chart:
    """Describes a section's picture: lines over `across`, or bars where `bars`. `bounds` are low and high of each
    value."""

    title: str
    unit: str
    across: Sequence[str]
    lines: Lines
    bars: bool = False
    bounds: Mapping[str, Sequence[tuple[float, float]]] | None = None

    @property
    def most(self) -> float:
        values = [value for line in self.lines.values() for value in line if value is not None]
        values += [high for line in (self.bounds or {}).values() for _, high in line]
        return max(values, default=0.0) or 1.0


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = ()


# What each bench has to show


def decode(figures: Mapping[str, Any]) -> Iterator[Section]:
    for arm, title in (("engine", "One stream, in the engine"), ("served", "One stream, through gRPC")):
        if arm not in figures:
            continue
        found = figures[arm]
        rows = [
            [at, row["tokens_per_second"], row["us_p50"], row["us_p95"], row["us_p99"], _percent(row.get("roofline"))]
            for at, row in found["contexts"].items()
        ]
        bandwidth = found.get("bandwidth")
        lines: dict[str, Sequence[float | None]] = {
            "measured": [row["tokens_per_second"] for row in found["contexts"].values()]
        }
        if bandwidth:
            lines["roofline"] = [
                round(bandwidth * 1e12 / row["bytes"], 1) if "bytes" in row else None
                for row in found["contexts"].values()
            ]
        gaps = {name: [row[f"us_{name}"] / 1e3 for row in found["contexts"].values()] for name in ("p50", "p95", "p99")}
        across = [f"{at} tokens before" for at in found["contexts"]]
        notes = [f"First token: p50 {found['first_token']['ms_p50']} ms, p95 {found['first_token']['ms_p95']} ms."]
        if bandwidth:
            notes.append(f"The roofline is the bytes that a token must read, at {1e3 * bandwidth:,.1f} GB/s.")
        if any(row.get("roofline", 0) > 1 for row in found["contexts"].values()):
            notes.append(
                "Above it: drafts give several tokens for one read, or the weights lie in the processor's caches."
            )
        head = ["tokens before", "tokens/s", "a token, µs, p50", "p95", "p99", "of the roofline"]
        charts = [
            Chart("Tokens a second against the roofline", "tokens/s", across, lines),
            Chart("Time of a token", "ms", across, gaps),
        ]
        yield Section(title, head, rows, charts, notes)
        if "peak_bytes" in found:
            yield _memory(found)


def _memory(found: Mapping[str, Any]) -> Section:
    weights = min(row.get("bytes", 0) for row in found["contexts"].values())
    rows: list[Sequence[object]] = [
        ["read for a token", _mib(weights)],
        ["most that was held", _mib(found["peak_bytes"])],
    ]
    if found.get("driver_bytes"):
        rows.append(["as the GPU's driver counts", _mib(found["driver_bytes"])])
    values = [float(str(row[1]).replace(",", "")) for row in rows]
    chart = Chart("Memory", "MiB", [str(row[0]) for row in rows], {"MiB": values}, bars=True)
    return Section("Memory", ["", "MiB"], rows, [chart])


def serve(figures: Mapping[str, Any]) -> Iterator[Section]:
    loads = figures["loads"]
    head = ["load", "tokens/s", "requests/s", "first token, ms, p50", "p95", "p99", "a token, ms, p95", "errors"]
    keys = ("output_tokens_per_second", "requests_per_second", "ttft_ms_p50", "ttft_ms_p95", "ttft_ms_p99")
    rows = [[one["workload"], *(one.get(key, "") for key in (*keys, "tpot_ms_p95", "errors"))] for one in loads]
    charts = []
    for kind, title in (("c", "streams at once"), ("rate", "requests a second")):
        some = [one for one in loads if one["workload"].removeprefix(kind).replace(".", "").isdigit()]
        if len(some) < 2:
            continue
        across = [one["workload"].removeprefix(kind) for one in some]
        first = {share: [one.get(f"ttft_ms_{share}") for one in some] for share in ("p50", "p95", "p99")}
        pace = {share: [one.get(f"tpot_ms_{share}") for one in some] for share in ("p50", "p95", "p99")}
        rate = {"tokens/s": [one["output_tokens_per_second"] for one in some]}
        charts += [
            Chart(f"First token by {title}", "ms", across, first),
            Chart(f"A token by {title}", "ms", across, pace),
            Chart(f"Throughput by {title}", "tokens/s", across, rate),
        ]
    yield Section("Load against latency, through gRPC", head, rows, charts)


def offline(figures: Mapping[str, Any]) -> Iterator[Section]:
    loads = figures["loads"]
    rows = [[one["workload"], one["output_tokens_per_second"], one["ttft_ms_p95"], one["errors"]] for one in loads]
    rate = {"tokens/s": [one["output_tokens_per_second"] for one in loads]}
    chart = Chart("Throughput", "tokens/s", [one["workload"] for one in loads], rate, bars=True)
    head = ["requests at once", "tokens/s", "first token, ms, p95", "errors"]
    yield Section("Throughput in the engine", head, rows, [chart])


def speculation(figures: Mapping[str, Any]) -> Iterator[Section]:
    found = figures["sets"]
    head = ["prompts", "with drafts, tokens/s", "without", "times", "accepted of proposed", "acceptance", "same ids"]
    rows = [
        [
            name,
            one["tokens_per_second"],
            one["without"],
            one["ratio"],
            f"{one['accepted']} of {one['proposed']}",
            _percent(one["acceptance"]),
            "yes" if one["same"] else "no",
        ]
        for name, one in found.items()
    ]
    rates = {
        "with drafts": [one["tokens_per_second"] for one in found.values()],
        "without": [one["without"] for one in found.values()],
    }
    share = {"accepted": [100 * (one["acceptance"] or 0.0) for one in found.values()]}
    charts = [
        Chart("Rates with drafts and without", "tokens/s", list(found), rates, bars=True),
        Chart("Acceptance of drafted tokens", "%", list(found), share, bars=True),
    ]
    yield Section("Speculation", head, rows, charts)


def cache(figures: Mapping[str, Any]) -> Iterator[Section]:
    rows: list[Sequence[object]] = [[name, one["p50"], one["p95"]] for name, one in figures["ms"].items()]
    times = {share: [one[share] for one in figures["ms"].values()] for share in ("p50", "p95")}
    charts = [Chart("Time by where it comes from", "ms", list(figures["ms"]), times, bars=True)]
    hits, of = figures["stored_hits"]
    notes = [
        f"Stored answers were found {hits} of {of} times, and are {'the same' if figures['same'] else 'NOT the same'}.",
        f"Of {figures['prompt_tokens']} prompt tokens {figures['cached_tokens']:.0f} were found.",
    ]
    found = figures["semantic"]
    if "missing" in found:
        notes.append(f"Questions in other words were not asked: {found['missing']}.")
    else:
        low, high = (100 * each for each in found["wrong_share_95"])
        total = found["of"]
        notes.append(
            f"Questions in other words: {found['right']} of {total} served rightly; {found['wrong']} of {total} that "
            f"only look alike served wrongly, a share of {low:.1f} to {high:.1f} % with 95 % certainty."
        )
        shares = {"served": [100 * found["right"] / total, 100 * found["wrong"] / total]}
        bounds = {"served": [(shares["served"][0], shares["served"][0]), (low, high)]}
        across = ["the same question", "another question (95 % interval)"]
        charts.append(Chart("Hits of the semantic cache", "%", across, shares, bars=True, bounds=bounds))
    yield Section("Caches", ["", "ms, p50", "p95"], rows, charts, notes)


def quality(figures: Mapping[str, Any]) -> Iterator[Section]:
    rows: list[Sequence[object]] = []
    for name, one in figures["forms"].items():
        if "left_out" in one:
            rows.append([name, f"left out: {one['left_out']}", "", "", ""])
            continue
        base, changed = one["perplexity"]
        value, low, high = one["change_percent"]
        rows.append([name, base, changed, f"{value:+.2f} % ({low:+.2f} to {high:+.2f})", _percent(one["agreement"])])
    yield Section("Quality", ["form", "perplexity, as it is", "in this form", "change", "same token"], rows)


def steps(figures: Mapping[str, Any]) -> Iterator[Section]:
    """Shows where the time of a step goes."""
    parts = ("plan", "run", "commit")
    rows: list[Sequence[object]] = [[n, *(row[part] for part in parts)] for n, row in figures["rows"].items()]
    lines = {part: [row[part] for row in figures["rows"].values()] for part in parts}
    across = [f"{n} rows" for n in figures["rows"]]
    notes = [f"Within run, torch's {name}: {share:.1%}." for name, share, _ in figures["operations"][:5]]
    chart = Chart("Parts of a step", "µs", across, lines, bars=True)
    yield Section("A step, microseconds", ["rows", *parts], rows, [chart], notes)


def start(figures: Mapping[str, Any]) -> Iterator[Section]:
    """Shows the seconds until a server is ready."""
    rows = []
    for name, one in figures.items():
        if isinstance(one, dict):
            ready = one["ends"]["ready"] if "ends" in one else one["ready"]
            rows.append([name, ready, one.get("ttft_ms", {}).get("first", "")])
    lines = {"seconds": [float(row[1]) for row in rows]}
    chart = Chart("Seconds until ready", "s", [str(row[0]) for row in rows], lines, bars=True)
    yield Section("Starts", ["", "seconds until ready", "first token of the first request, ms"], rows, [chart])


def ladder(figures: Mapping[str, Any]) -> Iterator[Section]:
    found = figures["rungs"]
    rows = [[one["rung"], one["tokens_per_second"], f"{one['gain']:.2f}", f"{one['total']:.2f}"] for one in found]
    lines = {"tokens/s": [one["tokens_per_second"] for one in found]}
    notes = [f"{one['rung']} is left out: {one['why']}." for one in figures["left_out"]]
    if not figures["same"]:
        notes.append("Answers of one form of the weights were NOT the same on all rungs.")
    chart = Chart("Switched on one after another", "tokens/s", [one["rung"] for one in found], lines, bars=True)
    yield Section(
        "Ladder", ["switched on", "tokens/s", "times the rung before", "times the first"], rows, [chart], notes
    )


def peers(figures: Mapping[str, Any]) -> Iterator[Section]:
    found = figures["rows"]
    rows: list[Sequence[object]] = [
        [one["peer"], one["tokens_per_second"], one["first_ms"], one["whippet_times"]] for one in found
    ]
    notes = [f"{name} is missing: {why}." for name, why in figures["missing"].items()]
    notes.append(", ".join(f"{name} {version}" for name, version in figures["versions"].items() if version) + ".")
    lines = {"tokens/s": [one["tokens_per_second"] for one in found]}
    chart = Chart("Beside others", "tokens/s", [one["peer"] for one in found], lines, bars=True)
    head = ["", "tokens/s after the first", "first token, ms", "Whippet's rate by this one's"]
    yield Section("Peers", head, rows, [chart], notes)


SECTIONS = {
    one.__name__: one for one in (decode, serve, offline, ladder, peers, speculation, cache, quality, steps, start)
}


# The page


def sections(records: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Returns sections of all results that can be drawn, in the page's order."""
    by_name = {record["bench"]: record for record in records}
    return [one for name, show in SECTIONS.items() if name in by_name for one in show(by_name[name]["figures"])]


def write(folder: Path) -> Path:
    """Reads the results of a folder, writes report.html there and a PNG a picture. Raises ValueError."""
    records = [load(path) for path in sorted(folder.glob("*.json"))]
    found = sections(records)
    target = folder / "report.html"
    target.write_text(page(records, found), "utf-8")
    pictures(folder, found)
    return target


def page(records: Sequence[Mapping[str, Any]], found: Sequence[Section]) -> str:
    about = {f"{one['device']} · {one['revision']}" for one in records}
    models = {str(one["settings"].get("model")) for one in records} - {"None"}
    links = "".join(f'<li><a href="#s{n}">{_safe(one.title)}</a></li>' for n, one in enumerate(found))
    body = "\n".join(_section(n, one) for n, one in enumerate(found))
    codes = "".join(f"<tr><td>{_safe(one['bench'])}</td><td>{_safe(one['code'])}</td></tr>" for one in records)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Whippet, measured</title><style>{_STYLE}</style></head><body>
<h1>Whippet, measured</h1>
<p>{_safe("; ".join(sorted(about)))}. Model: {_safe(", ".join(sorted({Path(one).name for one in models})))}.</p>
<nav><ul>{links}</ul></nav>
{body}
<h2>Code that was measured</h2><table><tr><th>bench</th><th>hash</th></tr>{codes}</table>
</body></html>
"""


_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --back: #fff; --line: #d0d7de; --dim: #59636e }
@media (prefers-color-scheme: dark) { :root { --text: #f0f6fc; --back: #0d1117; --line: #3d444d; --dim: #9198a1 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1rem; list-style: none; padding: 0 }
a { color: inherit } h2 { border-top: 1px solid var(--line); padding-top: 1rem; margin-top: 2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: .5rem 0 }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
figure { margin: 1rem 0; display: inline-block; max-width: 100% } figcaption { color: var(--dim) }
svg { max-width: 100%; height: auto } svg text { fill: var(--text) } svg .grid { stroke: var(--line) }
"""


def _section(number: int, one: Section) -> str:
    head = "".join(f"<th>{_safe(cell)}</th>" for cell in one.head)
    rows = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in one.rows)
    notes = "".join(f"<p>{_safe(note)}</p>" for note in one.notes)
    drawn = "\n".join(
        f"<figure>{svg(chart)}<figcaption>{_safe(chart.title)}, {_safe(chart.unit)}</figcaption></figure>"
        for chart in one.charts
    )
    return (
        f'<section id="s{number}"><h2>{_safe(one.title)}</h2>'
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>{notes}{drawn}</section>'
    )


def svg(chart: Chart) -> str:
    """Draws a picture for both colour schemes: text and grid take the page's colours."""
    right, bottom, roof = _WIDE - 12, _HIGH - _FOOT, 34
    most, found = chart.most, list[str]()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = bottom - (bottom - roof) * share
        found.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{most * share:,.4g}</text>')
    room = (right - _LEFT) / max(len(chart.across), 1)
    places = [_LEFT + room * (at + 0.5) for at in range(len(chart.across))]
    for number, (place, name) in enumerate(zip(places, chart.across, strict=True)):
        low = 16 + 13 * (number % 2 if room < 120 else 0)
        most_letters = int(2 * room / 6 if room < 120 else room / 6)
        short = name if len(name) <= most_letters else name[: most_letters - 1] + "…"
        found.append(f'<text x="{place:.1f}" y="{bottom + low}" text-anchor="middle">{_safe(short)}</text>')
    for number, (line, values) in enumerate(chart.lines.items()):
        draw = _bars if chart.bars else _line
        found += draw(chart, number, line, values, places, room, lambda v: bottom - (bottom - roof) * v / most)
        found.append(f'<rect x="{_LEFT + 120 * number}" y="10" width="12" height="12" fill="{_colour(number)}"/>')
        found.append(f'<text x="{_LEFT + 120 * number + 18}" y="20">{_safe(line)}</text>')
    name = _safe(f"{chart.title}, {chart.unit}")
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" font-size="11" role="img" '
        f'aria-label="{name}"><title>{name}</title>{"".join(found)}</svg>'
    )


def _line(
    chart: Chart, number: int, line: str, values: Sequence[float | None], places: Sequence[float], room: float, y: Any
) -> list[str]:
    dots = [(x, y(value)) for x, value in zip(places, values, strict=True) if value is not None]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in dots)
    dash = f' stroke-dasharray="{_DASHES[number % len(_DASHES)]}"' if _DASHES[number % len(_DASHES)] else ""
    colour = _colour(number)
    found = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    return found + [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in dots]


def _bars(
    chart: Chart, number: int, line: str, values: Sequence[float | None], places: Sequence[float], room: float, y: Any
) -> list[str]:
    wide = min(60.0, 0.7 * room / len(chart.lines))
    found, bounds = list[str](), (chart.bounds or {}).get(line)
    for at, (place, value) in enumerate(zip(places, values, strict=True)):
        left, high = place - wide * len(chart.lines) / 2 + wide * number, value or 0.0
        middle = left + wide / 2
        found.append(
            f'<rect x="{left:.1f}" y="{y(high):.1f}" width="{wide:.1f}" height="{y(0.0) - y(high):.1f}" '
            f'fill="{_colour(number)}"/>'
            f'<text x="{middle:.1f}" y="{y(high) - 4:.1f}" text-anchor="middle">{high:,.4g}</text>'
        )
        if bounds is not None:
            low, top = bounds[at]
            found.append(f'<path d="M{middle:.1f} {y(low):.1f}V{y(top):.1f}" stroke="{_COLOURS[1]}" stroke-width="3"/>')
    return found


def pictures(folder: Path, found: Sequence[Section]) -> list[Path]:
    """Writes PNGs, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for section in found:
        for chart in section.charts:
            figure, axes = pyplot.subplots(figsize=(7, 3.5))
            _plotted(axes, chart)
            axes.set_title(chart.title)
            axes.set_ylabel(chart.unit)
            axes.set_ylim(bottom=0)
            axes.legend()
            name = "".join(letter if letter.isalnum() else "-" for letter in f"{section.title} {chart.title}".lower())
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=120)
            pyplot.close(figure)
            made.append(folder / f"{name}.png")
    return made


def _plotted(axes: Any, chart: Chart) -> None:
    count = len(chart.lines)
    for number, (line, values) in enumerate(chart.lines.items()):
        heights = [float("nan") if value is None else value for value in values]
        if not chart.bars:
            axes.plot(list(chart.across), heights, marker="o", label=line, color=_colour(number))
            continue
        wide = 0.8 / count
        places = [at + wide * (number - (count - 1) / 2) for at in range(len(chart.across))]
        axes.bar(places, heights, wide, label=line, color=_colour(number))
        axes.set_xticks(range(len(chart.across)), list(chart.across), rotation=15)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else _safe(str("" if value is None else value))


def _safe(text: object) -> str:
    return html.escape(text if isinstance(text, str) else json.dumps(text))


def standalone(title: str, charts: Sequence[Chart]) -> str:
    """Pictures one below the other, as a file of their own."""
    drawn = "".join(svg(chart).replace("<svg ", f'<svg y="{30 + _HIGH * at}" ', 1) for at, chart in enumerate(charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{30 + _HIGH * len(charts)}" '
        f'font-family="sans-serif"><style>.grid {{ stroke: #d0d7de }}</style><rect width="100%" height="100%" '
        f'fill="white"/><text x="12" y="20" font-size="13">{_safe(title)}</text>{drawn}</svg>\n'
    )
