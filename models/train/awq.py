"""The last step: the target in four bits, made by Whippet's own quantizer, with what that cost on its card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

import torch
from tqdm import tqdm

from models.train.corpus import Document, documents
from models.train.run import TARGET
from quant.calibration import text_windows
from quant.evaluate import Comparison, evaluate
from quant.quantizer import QuantizeOptions, quantize

AWQ = "demo-awq"
GROUP = 32  # so small a model is hurt less by small groups
CALIBRATION_DOCUMENTS = 600  # spread over the training text
LENGTH = 512  # tokens in a window that judges
# Added to the target's sampling defaults, since this is the folder that people try: alone, so small a model repeats a
# line until the context is full. The target has none of it: tests compare its plain greedy answers with other readers.
DEFAULTS = {"max_new_tokens": 256, "repetition_penalty": 1.1}


def write_awq(lib: Path, work: Path, models: Path) -> None:
    """Writes models/demo-awq; a run that was stopped goes on."""
    splits = documents(lib)
    train = splits["train"]
    calibration = _write(work / "calibration.txt", train[:: len(train) // CALIBRATION_DOCUMENTS])
    heldout = _write(work / "heldout.txt", splits["heldout"])
    base, out = models / TARGET, models / AWQ
    quantize(base, out, QuantizeOptions(group=GROUP, text=calibration, samples=128, held_out=32), _told)
    defaults = out / "generation_config.json"
    defaults.write_text(json.dumps(generation_defaults(base), indent=2) + "\n", "utf-8")
    windows = text_windows(base, heldout, LENGTH)
    found = evaluate(out, windows, base, _told, torch.device("cpu"))
    if found.comparison is not None:
        (out / "README.md").write_text(card(out, windows.numel(), found.perplexity, found.comparison), "utf-8")


def generation_defaults(base: Path) -> dict[str, object]:
    """Content of generation_config.json."""
    given: dict[str, object] = json.loads((base / "generation_config.json").read_text("utf-8"))
    return dict(sorted({**given, **DEFAULTS}.items()))


def card(folder: Path, tokens: int, perplexity: float, found: Comparison) -> str:
    """The folder's README."""
    change = found.perplexity_change
    template = Template(resources.files("models.train").joinpath("card_awq.md").read_text("utf-8"))
    return template.substitute(
        group=GROUP,
        length=LENGTH,
        tokens=f"{tokens:,}",
        megabytes=f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        base=f"{found.base_perplexity:.3f}",
        perplexity=f"{perplexity:.3f}",
        change=f"{change.value:+.2%} ({change.low:+.2%} to {change.high:+.2%})",
        kl=f"{found.kl:.4f}",
        agreement=f"{found.agreement:.1%}",
        greedy=f"{found.greedy:.1f} of {found.greedy_of}",
        text=json.loads((folder / "quantization.json").read_text("utf-8"))["options"]["text"],
    )


def _write(path: Path, texts: Sequence[Document]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(document.text for document in texts), "utf-8")
    return path


def _told(stage: str, done: int, total: int) -> None:
    tqdm.write(f"{stage} {done} of {total}")
