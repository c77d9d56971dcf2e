"""Reports a quantization, as JSON for machines and Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from quant.evaluate import Comparison, Evaluation
from quant.metrics import AGREEMENT_BAR, KL_BAR, PERPLEXITY_BAR
from quant.shards import write_text

NAME: Final = "quantization"  # of the two files


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """layers: one record a decoder layer, as the job kept them. bytes: of the weight files. plan: which linears have
    how many bits, where four are among them."""

    options: Mapping[str, Any]
    source_bytes: int
    bytes: int
    layers: Sequence[Mapping[str, Any]]
    evaluation: Evaluation
    plan: Mapping[str, Any] | None = None

    def write(self, folder: Path) -> None:
        write_text(folder / f"{NAME}.json", json.dumps(asdict(self), indent=2) + "\n")
        write_text(folder / f"{NAME}.md", self.markdown())

    def misses(self) -> tuple[str, ...]:
        """The bars that the model does not meet, in words."""
        return self.evaluation.comparison.misses() if self.evaluation.comparison else ()

    def _advice(self) -> list[str]:
        """Returns options that lose less, where a bar was missed."""
        if not self.misses():
            return []
        if self.options["format"] != "awq":
            return ["", "Eight bits are the most that a quantized model has here: serve the original, or judge both on",
                    "text of the kind that you serve (`whippet evaluate`)."]  # fmt: skip
        if self.options.get("budget") is not None:
            return ["", "A larger --budget, or 8 bits (--format int8), lose less."]
        smaller = [group for group in (64, 32) if group < self.options["group"]]
        groups = f"Smaller groups (--group {' or '.join(map(str, smaller))}), or " if smaller else ""
        return ["", f"{groups}8 bits (--format int8) lose less."]

    def markdown(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options.items() if value is not None)
        lines = [
            "# Quantization report",
            "",
            f"Options: {options}.",
            f"Weights: {_mib(self.source_bytes)} before, {_mib(self.bytes)} after.",
            *_plan_lines(self.plan),
            "",
            *evaluation_lines(self.evaluation),
            *self._advice(),
        ]
        return "\n".join([*lines, *_layer_lines(self.layers)]) + "\n"


def _plan_lines(plan: Mapping[str, Any] | None) -> list[str]:
    """Describes where the bits went."""
    if plan is None:
        return []
    eight = sum(len(names) for names in plan["eight"].values())
    stay = f"; {eight} linears stay in 8 bits" if eight else ""
    return [f"Linears: {plan['bits']:.2f} bits a weight, in groups of {plan['group']}{stay}."]


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    lines = [f"Text: {evaluation.windows} windows, {evaluation.tokens} predicted tokens.", ""]
    found = evaluation.comparison
    if found is None:
        return [*lines, f"Perplexity {evaluation.perplexity:.3f}."]
    change = found.perplexity_change
    interval = f"{change.value:+.2%} (95 %: {change.low:+.2%} to {change.high:+.2%})"
    perplexity = f"{found.base_perplexity:.3f} → {evaluation.perplexity:.3f}, {interval}"
    return [
        *lines,
        "| measure | value | bar |",
        "| --- | --- | --- |",
        f"| perplexity | {perplexity} | ≤ +{PERPLEXITY_BAR:.0%} |",
        f"| mean KL, nats | {found.kl:.5f} | ≤ {KL_BAR} |",
        f"| top-1 agreement | {found.agreement:.2%} | ≥ {AGREEMENT_BAR:.0%} |",
        f"| greedy answers agree for | {found.greedy:.1f} of {found.greedy_of} tokens | |",
        "",
        _verdict(found),
    ]


def _verdict(found: Comparison) -> str:
    misses = found.misses()
    if not misses:
        return "All bars are met."
    return f"Missed: {'; '.join(misses)}."


def _layer_lines(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats a row per layer: the layer's own error, then each linear's. Other packages report no layers."""
    if not layers:
        return []
    names = [loss["name"] for loss in layers[0]["linears"]]
    head = ["layer", "seconds", "output", *(name.split(".")[-1] for name in names)]
    rows = [" | ".join(head), " | ".join("---" for _ in head)]
    for index, layer in enumerate(layers):
        losses = (_loss(loss) for loss in layer["linears"])
        rows.append(" | ".join([str(index), f"{layer['seconds']:.1f}", f"{layer['error']:.4f}", *losses]))
    intro = [
        "",
        "## Layers",
        "",
        "Relative root-mean-square errors. A linear: of its output on the calibration text, rounded to nearest → as",
        "quantized (8: in eight bits), or of its weight where nothing was calibrated. A layer: of what it adds to its",
        "input, or the worst of its linears.",
        "",
    ]
    return [*intro, *(f"| {row} |" for row in rows)]


def _loss(loss: Mapping[str, Any]) -> str:
    error = f"{loss['error']:.4f}"
    if "nearest" not in loss:
        return error
    return f"{loss['nearest']:.4f} → {error}{' (8)' if loss['bits'] == 8 else ''}"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
