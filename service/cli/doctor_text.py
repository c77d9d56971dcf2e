"""Prints the doctor's report for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NO_COMPILER = "no C compiler: without what was built ahead quantized and bfloat16 models are slow on a CPU"
_MORE = "--all: this machine, and what is not in use"


def render(report: dict[str, Any], everything: bool = False) -> str:
    plan = report["engine"].get("plan")
    lines = [
        ("verdict", _verdict(report)),
        *(("problem", problem) for problem in report["problems"]),
        *(("warning", warning) for warning in report["warnings"]),
        *_model(report["model"], report["engine"].get("model")),
        *(_plan(report["engine"]) if plan is not None else ()),
        *(_here(report, everything) if "machine" in report else ()),
    ]
    last = ""
    out = []
    for name, text in lines:
        out.append(f"{name if name != last else '':<11}{text}")
        last = name
    return "\n".join(out)


def _verdict(report: dict[str, Any]) -> str:
    plan = report["engine"].get("plan")
    if report["problems"]:
        return "serving is impossible"
    if plan is None:
        return "ready to serve"
    gpu = plan["gpu"]["title"]
    if plan["path"] == "eager":
        return f"one {gpu} would serve it eagerly, many times slower than its memory allows"
    speed = "" if plan["tokens_per_second"] is None else f", at about {_rate(plan)} tokens/s to one user"
    return f"one {gpu} would serve it by the {plan['path']} path{speed}"


def _rate(plan: dict[str, Any]) -> str:
    """Rounds to two digits, since this is an estimate."""
    digits = f"{plan['tokens_per_second']:.2g}"
    return f"{float(digits):,.0f}"


def _here(report: dict[str, Any], everything: bool) -> Iterator[tuple[str, str]]:
    yield from _machine(report, everything)
    yield from _engine(report["engine"], everything)
    yield from _ports(report["ports"], everything)
    if not everything:
        yield "more", _MORE


def _plan(engine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Says what a GPU that is not here would do."""
    plan, gpu = engine["plan"], engine["plan"]["gpu"]
    memory = f"{_size(gpu['memory_mib'] << 20)} at {gpu['bandwidth']:,} GB/s"
    yield "gpu", f"{gpu['title']}, {plan['architecture']}, {gpu['multiprocessors']} multiprocessors, {memory}; not here"
    for option in engine["decoders"]:
        standing = "would be in use" if option["chosen"] else f"would not, {option['reason']}"
        yield "decoder", f"{option['name']}: {standing}"
    if plan["unpacked"]:
        yield "weights", "some are kept in 16 bits, since the kernels do not read their shape packed"
    for option in engine["optimizations"]:
        if option["reason"]:
            yield "switch", f"{option['name']}: would do nothing, {option['reason']}"
    whole = plan["tokens"] // engine["model"]["max_context"]
    fit = f"{plan['tokens']:,} tokens of context in all, {plan['sequences']} sequences at once"
    yield "memory", f"{fit}; whole contexts: {whole}"
    if plan["copies_bytes"]:
        yield "memory", f"{_size(plan['copies_bytes'])} of plain copies beside packed weights"
    if plan["tokens_per_second"] is not None:
        read = f"{_size(plan['step_bytes'])} are read for a token"
        yield "speed", f"{read}; estimated from what an H100 reaches, and measured on no other GPU"
    kernels = plan["kernels"]
    if not kernels["count"]:
        return
    yield "kernels", f"{kernels['count']} of {len(kernels['sources'])} sources, compiled at the first start"
    if kernels["not_offered"]:
        yield "kernels", f"without {', '.join(kernels['not_offered'])}: {kernels['not_offered_reason']}"


def _machine(report: dict[str, Any], everything: bool) -> Iterator[tuple[str, str]]:
    machine, kept = report["machine"], report["kept"]
    memory = ("memory", f"{_size(machine['memory_bytes'])}, {_size(machine['free_bytes'])} free")
    if not everything:
        yield memory
        if machine["compiler"] is None:
            yield "compiler", _NO_COMPILER
        if kept["wrong"]:
            yield "cache-dir", ", ".join(filter(None, (kept["folder"], kept["wrong"])))
        return
    yield "whippet", f"{report['whippet']} on Python {machine['python']}, {machine['system']}"
    yield (
        "processor",
        f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['features']) or 'no vectors'}",
    )
    yield memory
    yield "packages", ", ".join(f"{name} {found or 'MISSING'}" for name, found in machine["packages"].items())
    yield "compiler", machine["compiler"] or _NO_COMPILER
    yield "cache-dir", ", ".join(filter(None, (kept["folder"] or "none", kept["wrong"])))
    yield "prebuilt", report["prebuilt"] or "nothing was built ahead"


def _engine(engine: dict[str, Any], everything: bool) -> Iterator[tuple[str, str]]:
    if "torch" not in engine:
        return
    if everything:
        cuda = f"CUDA {engine['cuda']}" if engine["cuda"] else "no CUDA"
        yield "torch", f"{engine['torch']}, {cuda}, {engine['threads']} threads"
    for gpu in engine["gpus"]:
        room = f"{_size(gpu['memory_bytes'])}, {_size(gpu['free_bytes'])} free"
        yield "gpu", f"{gpu['name']}, capability {gpu['capability']}, {room}"
    if engine["device"]:
        yield "device", engine["device"]
    for rank in engine.get("ranks", ()):
        yield "rank", _rank(rank)
    for title in ("dtypes", "formats", "decoders", "proposers", "optimizations"):
        name = "switch" if title == "optimizations" else title.removesuffix("s")
        for option in engine.get(title, ()):
            if everything or _matters(option, title, engine):
                yield name, f"{option['name']}: {_standing(option)}"


def _rank(rank: dict[str, Any]) -> str:
    heads = f"{rank['heads']} heads, {rank['kv_heads']} of keys and values"
    held = f"{rank['channels']:,} channels, {rank['tokens']:,} tokens of the vocabulary"
    return f"{rank['rank']}: {heads}, {held}, {_size(rank['weights_bytes'])} of weights"


def _matters(option: dict[str, Any], title: str, engine: dict[str, Any]) -> bool:
    lost = engine["gpus"] and title in ("decoders", "optimizations")
    lost = lost or (engine.get("ranks") and title == "optimizations" and option["name"] == "fused_kernels")
    return bool(option["chosen"] or (lost and option["reason"]))


def _standing(option: dict[str, Any]) -> str:
    if option["chosen"]:
        return "in use"
    return f"not in use, {option['reason']}" if option["reason"] else "available"


def _ports(ports: list[dict[str, Any]], everything: bool) -> Iterator[tuple[str, str]]:
    for one in ports:
        if everything or one["problem"]:
            yield "port", f"{one['address']}: {one['problem'] or 'free'}"


def _model(model: dict[str, Any] | None, engine: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if model is None:
        return
    yield "model", str(model["folder"])
    if engine is not None:
        millions = f"{engine['parameters'] / 1e6:.1f} M parameters"
        yield "model", f"{engine['architecture']}, {engine['weight_format']}, {millions}"
        held, made_for = engine["max_context"], engine["model_context"]
        context = f"{held:,} tokens" if held == made_for else f"{held:,} of {made_for:,} tokens"
        kept = f"{_size(engine['kv_bytes'])} of keys and values"
        yield (
            "model",
            f"{_size(engine['weights_bytes'])} of weights, context {context}, {engine['pages']} pages, {kept}",
        )
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
