"""Tables of what was measured on a GPU, Whippet beside its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scripts.cells import fixed, joined, percent, table, whole
from scripts.results import Results

QWEN, QWEN_AWQ, MISTRAL_AWQ = ("qwen3-0.6b", "bf16"), ("qwen3-0.6b", "awq-int4-g128"), ("mistral-7b", "awq-int4-g128")
MISTRAL_INT8 = ("mistral-7b", "int8")
MODELS = {
    QWEN: "Qwen3-0.6B, bf16",
    QWEN_AWQ: "Qwen3-0.6B, AWQ 4-bit",
    MISTRAL_AWQ: "Mistral-7B, AWQ 4-bit",
    MISTRAL_INT8: "Mistral-7B, 8-bit made while loading",
}
CONTEXTS = ("128", "1024", "8192")
MANY = ("16", "64", "256")
PEERS = ("vLLM 0.26", "nano-vllm", "transformers 5.17, compiled")
VLLM, OURS = "vLLM 0.26", "Whippet"


def runs(results: Results) -> dict[tuple[str, str], Any]:
    """Runs of bench.decode by model and weights: greedy and served through gRPC."""
    found = {}
    for run in results["decode-h100"]:
        if run["settings"]["temperature"] == 0 and "served" in run:
            model = run["settings"]["model"].rpartition("/")[2].removesuffix("-awq")
            weights = run["engine"]["weights"]
            found[model, "bf16" if weights == "dense" else weights] = run
    return found


def served(run: Any, context: str) -> float | None:
    """Returns tokens a second through gRPC."""
    found = run["served"]["contexts"].get(context)
    return found and float(found["tokens_per_second"])


def peer(results: Results, model: tuple[str, str], name: str) -> Any:
    rows = results["peers-h100"]["decode"]
    return next((row for row in rows if (row["model"], row["weights"]) == model and row["peer"] == name), None)


def summary_h100(results: Results) -> str:
    ours, rows = runs(results), []
    for model, title in MODELS.items():
        cells = [joined(whole(served(ours[model], context)) for context in CONTEXTS)]
        for name in PEERS:
            found = peer(results, model, name)
            cells.append(
                joined(whole(found["tokens_per_second"].get(context)) for context in CONTEXTS) if found else ""
            )
        rows.append([title, *cells])
    for model in (QWEN, MISTRAL_AWQ):
        first = fixed(ours[model]["engine"]["first_token"]["ms_p50"])
        rows.append(
            [f"first token, ms: {MODELS[model]}", first, fixed(peer(results, model, VLLM)["first_token_ms"]), "", ""]
        )
    for model in (QWEN, MISTRAL_AWQ):
        ours_many = joined(rate_of(measured(results, model, "grpc", f"n{count}")) for count in MANY)
        vllm = joined(whole(streams(results, model, VLLM)[count]) for count in MANY)
        rows.append([f"{' · '.join(MANY)} streams at once: {MODELS[model]}", ours_many, vllm, "", ""])
    return table(["", OURS, *PEERS], rows)


def decode_h100(results: Results) -> str:
    rows = []
    for run in results["decode-h100"]:
        engine, settings = run["engine"], run["settings"]
        weights = "bf16" if engine["weights"] == "dense" else engine["weights"]
        model = MODELS[settings["model"].rpartition("/")[2].removesuffix("-awq"), weights]
        if settings["temperature"]:
            model += f", temperature {settings['temperature']}, top-k {settings['top_k']}, top-p {settings['top_p']}"
        first = [fixed(engine["first_token"]["ms_p50"], 2)]
        if "served" in run:
            first.append(fixed(run["served"]["first_token"]["ms_p50"], 2))
        for number, (context, rate) in enumerate(engine["contexts"].items()):
            rows.append(
                [
                    "" if number else model,
                    whole(int(context)),
                    whole(rate["tokens_per_second"]),
                    percent(rate["roofline"]) + " %",
                    whole(served(run, context)) if "served" in run else "",
                    "" if number else " / ".join(first),
                    "" if number else f"{engine['peak_bytes'] / 1e9:.2f} / {engine['driver_bytes'] / 1e9:.2f}",
                    "" if number else run["revision"],
                ]
            )
    head = ["", "context", "engine, tokens/s", "of the roofline", "through gRPC, tokens/s"]
    return table([*head, "first token, engine / gRPC, ms", "GPU memory, torch / driver, GB", "commit"], rows)


def peers_h100(results: Results) -> str:
    rows = []
    for row in results["peers-h100"]["decode"]:
        rates = [whole(row["tokens_per_second"].get(context)) for context in CONTEXTS]
        if "range_128" in row:
            rates[0] += f" ({row['range_128'][0]} to {row['range_128'][1]})"
        title = MODELS[row["model"], row["weights"]]
        rows.append([title, row["peer"], row["how"], *rates, fixed(row.get("first_token_ms"))])
    return table(["", "peer", "how", *(f"{int(c):,}" for c in CONTEXTS), "first token, ms"], rows)


def published(results: Results) -> str:
    rates = results["peers-h100"]["published"]["tokens_per_second"]
    return "; ".join(f"{name} {rate:,}" for name, rate in rates.items())


def streams(results: Results, model: tuple[str, str], engine: str) -> Mapping[str, float]:
    """Returns output tokens a second by concurrent streams."""
    rows = results["streams-h100"]["output_tokens_per_second"]
    found = next(row for row in rows if (row["model"], row["weights"], row["engine"]) == (*model, engine))
    return {str(count): float(rate) for count, rate in found["streams"].items()}


def records(results: Results, model: tuple[str, str], path: str, workload: str) -> list[Mapping[str, Any]]:
    """Returns Whippet's records on an H100 without flags, the newest first; `path` is offline or grpc."""
    folder = model[0] + ("-awq" if model[1].startswith("awq") else "")
    wanted = (folder, path, workload)
    plain = [one for one in results["throughput-h100"] if "flags" not in one and "H100" in one["device"]]
    return [one for one in reversed(plain) if (one["model"], one["path"], one["workload"]) == wanted]


def measured(results: Results, model: tuple[str, str], path: str, workload: str) -> Mapping[str, Any] | None:
    return next(iter(records(results, model, path, workload)), None)


def rate_of(
    record: Mapping[str, Any] | None, unit: str = "output_tokens_per_second", form: Callable[[float], str] = whole
) -> str:
    return "" if record is None else form(float(record[unit]))


def streams_h100(results: Results) -> str:
    counts = list(streams(results, QWEN, VLLM))
    cells = []
    for model in (QWEN, MISTRAL_AWQ):
        peers = streams(results, model, VLLM)
        cells.append([f"{MODELS[model]}: {VLLM}, offline", *(whole(peers[count]) for count in counts)])
        for path, how in (("offline", "engine"), ("grpc", "through gRPC")):
            rates = (rate_of(measured(results, model, path, f"n{count}")) for count in counts)
            cells.append([f"{MODELS[model]}: {OURS}, {how}", *rates])
    return table(["streams at once", *counts], cells)


def first_h100(results: Results) -> str:
    """Renders the first token's time by length of the prompt: vLLM's, and Whippet's newest."""
    rows = [row for row in results["streams-h100"]["first_token_ms"] if row["engine"] == VLLM]
    cells = []
    for row in rows:
        model = (row["model"], row["weights"])
        ours = (measured(results, model, "offline", f"first{context}") for context in CONTEXTS)
        cells.append([f"{MODELS[model]}: {VLLM}", *(f"{row['prompt'][context]:g}" for context in CONTEXTS)])
        cells.append([f"{MODELS[model]}: {OURS}", *(rate_of(one, "ttft_ms_p95", fixed) for one in ours)])
    return table(["tokens of the prompt", *(f"{int(c):,}" for c in CONTEXTS)], cells)


WORKLOADS = {  # as `bench.workloads` calls what the peers were measured with
    "256 requests, 100 to 1,024 tokens in and out at random": ("mixed256", "output_tokens_per_second"),
    "1,024 requests of 128 tokens in and 128 out": ("short1024", "requests_per_second"),
}


def throughput_h100(results: Results) -> str:
    rows = []
    for row in results["peers-h100"]["throughput"]:
        model = (row["model"], row["weights"])
        workload, key = WORKLOADS[row["workload"]]
        unit = key.removesuffix("_per_second").replace("_", " ") + "/s"
        rates = {name: whole(rate) for name, rate in row[key].items()}
        for path, how in (("offline", "engine"), ("grpc", "through gRPC")):
            rates[f"{OURS}, {how}"] = rate_of(measured(results, model, path, workload), key)
        rows += [
            [f"{MODELS[model]}, {row['workload']}", name, f"{rate} {unit}"] for name, rate in rates.items() if rate
        ]
    return table(["", "", ""], rows)


KEPT_WORKLOADS = {  # as `bench.workloads` calls them
    "256 requests of 100 to 1,024 tokens in and out": ("mixed256", "output_tokens_per_second"),
    "256 requests of 128 tokens in, 128 out": ("n256", "output_tokens_per_second"),
    "1,024 of them, requests/s": ("short1024", "requests_per_second"),
}


def kept_h100(results: Results) -> str:
    """Keys and values as arithmetic has them and as fp8, in one run each."""
    rows = []
    for model in (QWEN, MISTRAL_AWQ):
        for title, (workload, unit) in KEPT_WORKLOADS.items():
            plain = {one["revision"]: one for one in records(results, model, "offline", workload)}
            narrow = records(results, model, "offline", f"{workload}-fp8")
            found = next((one for one in narrow if one["revision"] in plain), None)
            if found is not None:
                revision = found["revision"]
                rates = (rate_of(plain[revision], unit), rate_of(found, unit))
                rows.append([f"{MODELS[model]}: {title}", *rates, revision])
    runs = results["kept-h100"]
    for context in CONTEXTS:
        bf16, fp8 = (
            joined(
                whole(run["engine"]["contexts"][context]["tokens_per_second"])
                for run in runs
                if run["settings"]["kv_dtype"] == kept
            )
            for kept in ("auto", "fp8")
        )
        title = f"{MODELS[QWEN]}: one stream behind {int(context):,} tokens, two processes each"
        rows.append([title, bf16, fp8, runs[0]["revision"]])
    return table(["output tokens/s", "bf16", "fp8", "commit"], rows)


H200_WORKLOADS = {
    "decode 128": "one stream behind 128 tokens, tokens/s",
    "first token 128": "first token of 128, ms",
    "n1": "one request of 128 tokens in and 128 out, tokens/s",
    "mixed256": "256 requests, 100 to 1,024 tokens in and out at random, tokens/s",
}


def peers_h200(results: Results) -> str:
    """Renders all figures of Whippet beside the newest vLLM on an H200."""
    found, rows = results["peers-h200"], []
    for row in found["rows"]:
        title = H200_WORKLOADS.get(row["workload"], f"{row['workload'][1:]} streams at once, tokens/s")
        form = fixed if row["unit"] == "ms" else whole
        rows.append(
            [f"{MODELS[row['model'], row['weights']]}: {title}", *(form(row[name]) for name in ("whippet", "vllm"))]
        )
    return table(["one H200", OURS, found["peer"]], rows)


def newest_vllm(results: Results) -> str:
    """Renders the few of those figures that the README shows."""
    found, rows = results["peers-h200"], []
    for model in (QWEN, MISTRAL_AWQ):
        of = {row["workload"]: row for row in found["rows"] if (row["model"], row["weights"]) == model}
        rates = (joined(whole(of[one][name]) for one in ("decode 128", "n64", "n256")) for name in ("whippet", "vllm"))
        rows.append([f"{MODELS[model]}: 1 · 64 · 256 streams, tokens/s", *rates])
        first = of["first token 128"]
        rows.append([f"{MODELS[model]}: first token, ms", fixed(first["whippet"]), fixed(first["vllm"])])
    return table(["one H200", OURS, found["peer"]], rows)


def next_day(results: Results) -> str:
    """Returns vLLM's requests a second in the 1,024 requests of 128 tokens, a day later."""
    return " and ".join(str(row["requests_per_second"]) for row in results["streams-h100"]["throughput"])
