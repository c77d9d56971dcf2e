"""Lines in an SVG: a panel a figure, drawn over the load. Needs nothing."""

from __future__ import annotations

from collections.abc import Sequence

_WIDE, _HIGH, _EDGE = 420, 240, 56
_COLOURS = ("#1f6feb", "#d29922", "#cf222e")


def svg(title: str, loads: Sequence[str], panels: Sequence[tuple[str, dict[str, Sequence[float]]]]) -> str:
    """Of panels (name, lines by name); each line has a value a load."""
    high = 30 + len(panels) * _HIGH
    drawn = [_panel(30 + _HIGH * at, name, loads, lines) for at, (name, lines) in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{high}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{_EDGE}" y="18" font-size="13">{_safe(title)}</text>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _panel(top: int, name: str, loads: Sequence[str], lines: dict[str, Sequence[float]]) -> str:
    most = max((value for values in lines.values() for value in values), default=0.0) or 1.0
    left, right, bottom, roof = _EDGE, _WIDE - 16, top + _HIGH - 36, top + 34
    places = [left + (right - left) * at / max(len(loads) - 1, 1) for at in range(len(loads))]
    found = [f'<text x="{left}" y="{top + 14}">{_safe(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        at = bottom - (bottom - roof) * share
        found.append(f'<path d="M{left} {at:.1f}H{right}" stroke="#d0d7de"/>')
        found.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{most * share:,.4g}</text>')
    for place, load in zip(places, loads, strict=True):
        found.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{_safe(load)}</text>')
    for number, (line, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dots = [(x, bottom - (bottom - roof) * value / most) for x, value in zip(places, values, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        found.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        found.append(f'<text x="{left + 90 * number}" y="{top + 27}" fill="{colour}">{_safe(line)}</text>')
    return "\n".join(found)


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
