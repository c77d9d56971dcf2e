"""Which of two questions the semantic cache would take for the same: the guard against a cosine threshold alone, on
pairs that no rule was written beside. Ends in one JSON line. No clock is involved; only the embedder's digest matters.
"""

from __future__ import annotations

import json
from collections import Counter

from scipy.stats import binomtest  # type: ignore[import-untyped]

from bench.about import ROOT, device, revision
from cache.semantic.embedder import ModelEmbedder, open_embedder
from cache.semantic.export import exported
from cache.semantic.guard import strictly_equal, veto

DATA = ROOT / "tests" / "cache" / "semantic" / "data"
SUITES = ("pairs", "signs", "ordinary")  # their halves that no rule was written beside
COSINE = 0.90
STRICT_COSINE = 0.80


def served(suite: str, embedder: ModelEmbedder) -> dict[str, dict[str, object]]:
    """For each rule: pairs served that mean the same, and pairs served that do not, with a 95 % interval."""
    rows = [json.loads(line) for line in (DATA / f"{suite}_held_out.jsonl").read_text().splitlines()]
    same = {"signs": False, "ordinary": True}
    totals: Counter[bool] = Counter()
    counts: Counter[tuple[str, bool]] = Counter()
    for row in rows:
        means = row["same"] if suite == "pairs" else same[suite]
        totals[means] += 1
        near = float(embedder.embed(row["a"]) @ embedder.embed(row["b"]))
        equal = strictly_equal(row["a"], row["b"]) and not veto(row["a"], row["b"])
        counts["guarded", means] += equal and near >= STRICT_COSINE
        counts["cosine", means] += near >= COSINE
    return {rule: _shares(totals, counts[rule, False], counts[rule, True]) for rule in ("guarded", "cosine")}


def _shares(totals: Counter[bool], wrong: int, right: int) -> dict[str, object]:
    found: dict[str, object] = {"wrong": wrong, "wrong_of": totals[False], "right": right, "right_of": totals[True]}
    if totals[False]:
        low, high = binomtest(wrong, totals[False]).proportion_ci(method="wilson")
        found["wrong_share"] = [round(float(low), 4), round(float(high), 4)]
    return found


def main() -> None:
    """Entry point."""
    embedder = open_embedder(exported())
    figures = {suite: served(suite, embedder) for suite in SUITES}
    for suite, rules in figures.items():
        for rule, row in rules.items():
            wrong, right = f"{row['wrong']} of {row['wrong_of']}", f"{row['right']} of {row['right_of']}"
            print(f"{suite:10} {rule:10} wrong {wrong}, right {right}")
    settings = {"cosine": COSINE}
    print(
        json.dumps({"bench": "pairs", "sha": revision(), "device": device(), "settings": settings, "figures": figures})
    )


if __name__ == "__main__":
    main()
