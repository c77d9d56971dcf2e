"""Which of two questions the semantic cache would take for the same: the guard against a cosine threshold alone, on
pairs that no rule was written beside. Ends in one JSON line. No clock is involved; only the embedder's digest matters.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from scipy.stats import binomtest  # type: ignore[import-untyped]

from bench.about import ROOT, device, revision
from cache.semantic.embedder import ModelEmbedder, open_embedder
from cache.semantic.export import exported
from cache.semantic.guard import strictly_equal, veto

PAIRS = ROOT / "tests" / "cache" / "semantic" / "data" / "pairs_held_out.jsonl"
COSINE = 0.90
STRICT_COSINE = 0.80


def served(path: Path, embedder: ModelEmbedder) -> dict[str, dict[str, object]]:
    """For each rule: pairs served that mean the same, and pairs served that do not, with a 95 % interval."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    totals = Counter(row["same"] for row in rows)
    counts: Counter[tuple[str, bool]] = Counter()
    for row in rows:
        near = float(embedder.embed(row["a"]) @ embedder.embed(row["b"]))
        equal = strictly_equal(row["a"], row["b"]) and not veto(row["a"], row["b"])
        counts["guarded", row["same"]] += equal and near >= STRICT_COSINE
        counts["cosine", row["same"]] += near >= COSINE
    found: dict[str, dict[str, object]] = {}
    for rule in ("guarded", "cosine"):
        wrong = counts[rule, False]
        low, high = binomtest(wrong, totals[False]).proportion_ci(method="wilson")
        share = [round(float(low), 4), round(float(high), 4)]
        found[rule] = {"wrong": wrong, "wrong_of": totals[False], "wrong_share": share}
        found[rule] |= {"right": counts[rule, True], "right_of": totals[True]}
    return found


def main() -> None:
    """Entry point."""
    figures = served(PAIRS, open_embedder(exported()))
    for rule, row in figures.items():
        print(f"{rule:10} wrong {row['wrong']} of {row['wrong_of']}, right {row['right']} of {row['right_of']}")
    settings = {"pairs": PAIRS.name, "cosine": COSINE}
    print(
        json.dumps({"bench": "pairs", "sha": revision(), "device": device(), "settings": settings, "figures": figures})
    )


if __name__ == "__main__":
    main()
