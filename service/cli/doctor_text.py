"""The doctor's report as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def render(report: dict[str, Any]) -> str:
    machine, engine, kept = report["machine"], report["engine"], report["kept"]
    lines = [
        ("whippet", f"{report['whippet']} on Python {machine['python']}, {machine['system']}"),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['features']) or 'no vectors'}"),
        ("memory", f"{_size(machine['memory_bytes'])}, {_size(machine['free_bytes'])} free"),
        ("packages", ", ".join(f"{name} {found or 'MISSING'}" for name, found in machine["packages"].items())),
        (
            "compiler",
            machine["compiler"]
            or "no C compiler: without what was built ahead quantized and bfloat16 models are slow on a CPU",
        ),
        ("cache-dir", ", ".join(filter(None, (kept["folder"] or "none", kept["wrong"])))),
        ("prebuilt", report["prebuilt"] or "nothing was built ahead"),
        *_engine(engine),
        *_model(report["model"], engine.get("model")),
        *(("port", f"{one['address']}: {one['problem'] or 'free'}") for one in report["ports"]),
        *(("problem", problem) for problem in report["problems"]),
        ("verdict", "serving is impossible" if report["problems"] else "ready to serve"),
    ]
    last = ""
    out = []
    for name, text in lines:
        out.append(f"{name if name != last else '':<11}{text}")
        last = name
    return "\n".join(out)


def _engine(engine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "torch" not in engine:
        return
    cuda = f"CUDA {engine['cuda']}" if engine["cuda"] else "no CUDA"
    yield "torch", f"{engine['torch']}, {cuda}, {engine['threads']} threads"
    for gpu in engine["gpus"]:
        room = f"{_size(gpu['memory_bytes'])}, {_size(gpu['free_bytes'])} free"
        yield "gpu", f"{gpu['name']}, capability {gpu['capability']}, {room}"
    if engine["device"]:
        yield "device", engine["device"]
    for title in ("dtypes", "formats", "decoders", "proposers"):
        for option in engine[title]:
            yield title.removesuffix("s"), f"{option['name']}: {_standing(option)}"
    for option in engine.get("optimizations", ()):
        yield "switch", f"{option['name']}: {_standing(option)}"


def _standing(option: dict[str, Any]) -> str:
    if option["chosen"]:
        return "in use"
    return f"not in use, {option['reason']}" if option["reason"] else "available"


def _model(model: dict[str, Any] | None, engine: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if model is None:
        return
    yield "model", str(model["folder"])
    if engine is not None:
        millions = f"{engine['parameters'] / 1e6:.1f} M parameters"
        yield "model", f"{engine['architecture']}, {engine['weight_format']}, {millions}"
        weights = f"{_size(engine['weights_bytes'])} of weights"
        yield "model", f"{weights}, context {engine['max_context']} tokens, {engine['pages']} pages"
        if engine["digest"] is not None:
            yield "model", f"digest {engine['digest']}"
    if model["text"] is not None:
        text = model["text"]
        chat = "a chat template" if text["chat"] else "no chat template"
        ends = ", ".join(map(str, text["eos_token_ids"])) or "none"
        yield "model", f"{text['vocab_size']} tokens, {chat}, end-of-text ids {ends}"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
