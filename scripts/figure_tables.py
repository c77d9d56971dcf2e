"""The renderers that `scripts.figures` fills markers with: from result files to Markdown, nothing else.

What a result file has no figure for stays an empty cell: no figure is worked out that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from scripts.results import Renderer, Results

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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, with the line break after it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def rounded(value: float, digits: int) -> Decimal:
    """Half away from zero, of the decimal that the result file shows."""
    return Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def whole(value: float | None) -> str:
    """1,234."""
    return "" if value is None else f"{rounded(value, 0):,}"


def fixed(value: float | None, digits: int = 1) -> str:
    """1,234.5."""
    return "" if value is None else f"{rounded(value, digits):,}"


def percent(share: float, digits: int = 0) -> str:
    """A share in per cent, without the sign."""
    return f"{rounded(100 * share, digits)}"


def signed(share: float) -> str:
    """A change in per cent, with its sign unless it rounds to nothing."""
    text = f"{rounded(100 * share, 2):+}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def joined(values: Iterable[str]) -> str:
    """Figures that share a cell; trailing empty ones are left out."""
    return " · ".join(value for value in values if value)


# One stream on an H100


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
    """Tokens a second through gRPC."""
    found = run["served"]["contexts"].get(context)
    return found and float(found["tokens_per_second"])


def peer(results: Results, model: tuple[str, str], name: str) -> Any:
    """A peer's run, or None."""
    rows = results["peers-h100"]["decode"]
    return next((row for row in rows if (row["model"], row["weights"]) == model and row["peer"] == name), None)


def readme(results: Results) -> str:
    """One stream and many, Whippet beside its peers."""
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
    """bench.decode, all of it."""
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
    """Peers, one stream."""
    rows = []
    for row in results["peers-h100"]["decode"]:
        rates = [whole(row["tokens_per_second"].get(context)) for context in CONTEXTS]
        if "range_128" in row:
            rates[0] += f" ({row['range_128'][0]} to {row['range_128'][1]})"
        title = MODELS[row["model"], row["weights"]]
        rows.append([title, row["peer"], row["how"], *rates, fixed(row.get("first_token_ms"))])
    return table(["", "peer", "how", *(f"{int(c):,}" for c in CONTEXTS), "first token, ms"], rows)


def published(results: Results) -> str:
    """Others' own figures, in a sentence."""
    rates = results["peers-h100"]["published"]["tokens_per_second"]
    return "; ".join(f"{name} {rate:,}" for name, rate in rates.items())


def streams(results: Results, model: tuple[str, str], engine: str) -> Mapping[str, float]:
    """Output tokens a second by streams at once."""
    rows = results["streams-h100"]["output_tokens_per_second"]
    found = next(row for row in rows if (row["model"], row["weights"], row["engine"]) == (*model, engine))
    return {str(count): float(rate) for count, rate in found["streams"].items()}


def measured(results: Results, model: tuple[str, str], path: str, workload: str) -> Mapping[str, Any] | None:
    """The newest record of Whippet's on an H100; `path` is offline or grpc."""
    folder = model[0] + ("-awq" if model[1].startswith("awq") else "")
    wanted = (folder, path, workload)
    found = [one for one in results["throughput-h100"] if (one["model"], one["path"], one["workload"]) == wanted]
    return next((one for one in reversed(found) if "H100" in one["device"]), None)


def rate_of(record: Mapping[str, Any] | None, unit: str = "output_tokens_per_second") -> str:
    """Of a record, where there is one."""
    return "" if record is None else whole(float(record[unit]))


def streams_h100(results: Results) -> str:
    """Many streams, in the engine, through gRPC, and vLLM's."""
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
    """First token by length of the prompt, beside vLLM in one run."""
    rows = results["streams-h100"]["first_token_ms"]
    cells = [
        [f"{MODELS[row['model'], row['weights']]}: {row['engine']}", *(f"{row['prompt'][c]:g}" for c in CONTEXTS)]
        for row in rows
    ]
    return table(["tokens of the prompt", *(f"{int(c):,}" for c in CONTEXTS)], cells)


WORKLOADS = {  # as `bench.workloads` calls what the peers were measured with
    "256 requests, 100 to 1,024 tokens in and out at random": ("mixed256", "output_tokens_per_second"),
    "1,024 requests of 128 tokens in and 128 out": ("short1024", "requests_per_second"),
}


def throughput_h100(results: Results) -> str:
    """Throughput with all requests handed over at once."""
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


# One machine without a GPU


def engine_cpu(results: Results) -> str:
    """The demo model beside transformers."""
    found = results["engine-cpu"]
    rows = [[name, whole(row["median"])] for name, row in found["tokens_per_second"].items()]
    rows += [[f"ratio, {name}", f"{row['median']:.2f}"] for name, row in found["ratios"].items()]
    return table(["", "tokens/s"], rows)


def many_cpu(results: Results, streams: int) -> str:
    """Times as fast as transformers at its best one after the other."""
    ratios = results["engine-many-cpu"]["ratios"]
    return fixed(next(row["median"] for name, row in ratios.items() if f" {streams} streams /" in name))


def front_cpu(results: Results) -> str:
    """Throughput of the front."""
    rows = []
    for name, row in results["front-cpu"]["figures"].items():
        if "messages_per_s" in row:
            rates = [whole(row["messages_per_s"]), whole(row["tokens_per_s"]), whole(row["front_us_per_message"])]
            rows.append([name, *rates])
    return table(["", "messages/s", "tokens/s", "CPU µs a message"], rows)


def quantized_cpu(results: Results) -> str:
    """Weights in fewer bits, on a CPU."""
    rows = []
    for name, row in results["quantized-cpu"]["tokens_per_second"].items():
        size = row["weights_bytes"] / 2**20
        rows.append(
            [name, fixed(row["median"]), fixed(row["of_bfloat16"], 2), fixed(row["of_float32"], 2), whole(size)]
        )
    return table(["", "tokens/s", "of bfloat16", "of float32", "weights, MiB"], rows)


def quality_cpu(results: Results) -> str:
    """What fewer bits cost the demo model."""
    names = {"whippet-awq": "Whippet", "autoawq": "AutoAWQ 0.2.9", "nearest": "rounded to nearest"}
    ways = [(f"4 bits, groups of {g}: {title}", f"{name}-{g}") for g in (32, 128) for name, title in names.items()]
    ways += [("8 bits: Whippet, made while loading", "whippet-int8"), ("8 bits: bitsandbytes", "bitsandbytes-int8")]
    rows = []
    for title, name in ways:
        found = results["quality-cpu"]["figures"][name]["comparison"]
        change = found["perplexity_change"]
        interval = f"({signed(change['low'])} to {signed(change['high'])})"
        cells = [f"{signed(change['value'])} % {interval}", f"{found['kl']:.4f}", percent(found["agreement"], 1) + " %"]
        rows.append([title, *cells])
    return table(["", "perplexity (95 % interval)", "mean KL, nats", "same first choice"], rows)


# Caches


def lookups_cpu(results: Results) -> str:
    """Semantic lookups by length of the question."""
    figures = results["cache-cpu"]["figures"]
    lengths = [name.removeprefix("lookup, idle, ") for name in figures if name.startswith("lookup, idle, ")]
    rows = []
    for length in lengths:
        idle, busy = figures[f"lookup, idle, {length}"], figures[f"lookup, generating, {length}"]
        title = "CLINC150, " + length if "come" in length else length
        rows.append([title, fixed(idle["p50"]), fixed(idle["p95"]), fixed(busy["p50"]), fixed(busy["p95"])])
    return table(["question", "p50", "p95", "p50 while a model generates", "p95"], rows)


def pairs_cpu(results: Results) -> str:
    """The guard of the semantic cache against a cosine threshold alone."""
    found = results["pairs-cpu"]
    rules = {"guarded": "what `on` serves by equal words", "cosine": f"cosine {found['settings']['cosine']:.2f} alone"}
    rows = []
    for rule, title in rules.items():
        pairs, signs, ordinary = (found["figures"][suite][rule] for suite in ("pairs", "signs", "ordinary"))
        wrong = [f"{row['wrong']} of {row['wrong_of']} ({_interval(row['wrong_share'])})" for row in (pairs, signs)]
        right = [f"{row['right']} of {row['right_of']}" for row in (pairs, ordinary)]
        rows.append([title, *wrong, *right])
    heads = ["served wrongly: other words", "case or signs alone", "served rightly: other words", "case or signs alone"]
    return table(["", *heads], rows)


def _interval(shares: tuple[float, float]) -> str:
    return f"{percent(shares[0], 1)} to {percent(shares[1], 1)} %"


def faults_cpu(results: Results) -> str:
    """What a sick Redis costs a request."""
    titles = {
        "well": "healthy",
        "well again": "healthy again, last of the run",
        "slow": "each reply 100 ms late",
        "cut": "replies cut short",
        "full": "full (OOM on every write)",
        "read-only": "read-only",
        "emptied": "emptied before each request",
        "stalled": "accepts and never replies",
        "gone": "connection refused",
    }
    figures = results["cache-faults-cpu"]["figures"]
    rows = [[titles[name], *(fixed(figures[name][q]) for q in ("p50", "p95", "p99"))] for name in titles]
    return table(["Redis", "p50", "p95", "p99"], rows)


def prefix_cpu(results: Results) -> str:
    """First token with and without a shared prefix."""
    found = results["prefix-cpu"]["first_token"]
    titles = {
        "computed": "computed",
        "device": "found in the engine's memory",
        "redis, after a restart": "fetched from Redis by a newly started engine",
    }
    rows = []
    for name, title in titles.items():
        times = found["times_faster"][name]
        rows.append([title, whole(found["milliseconds"][name]), "" if times == 1 else f"{times:.1f}×"])
    return table(["", "first token, ms", ""], rows)


def trace_cpu(results: Results) -> str:
    """Hit rates of Mooncake's conversation trace."""
    rows = [
        [whole(row["blocks"]), percent(row["device"], 2) + " %", percent(row["device_beyond_head"], 2) + " %"]
        for row in results["prefix-cpu"]["trace"]
    ]
    return table(["room for blocks", "blocks found", "without the first block, which all requests share"], rows)


def soak(results: Results, key: str) -> float:
    """A figure of the ten minutes' soak."""
    return float(max(results["soak-h100"], key=lambda run: run["seconds"])[key])


def soaking(results: Results) -> str:
    """The two servers under callers and trouble."""
    rows = [
        [
            "the demo model" if run["model"] else "the fake engine",
            whole(run["requests"]),
            *(whole(ended(run, code)) for code in ("OK", "UNAVAILABLE")),
            whole(sum(run["trouble"].values())),
            whole(run["restarts"]),
            whole(run["faults"]),
            " / ".join(f"{rounded(run['grown_bytes'][name] / 2**20, 1)}" for name in ("front", "engine")),
        ]
        for run in results["soaking-cpu"]
    ]
    head = [
        "",
        "requests",
        "whole answers",
        "UNAVAILABLE",
        "troubles",
        "engines killed",
        "faults",
        "front / engine grew by, MiB",
    ]
    return table(head, rows)


def ended(run: Mapping[str, Any], code: str) -> int:
    """Requests of any kind that ended so."""
    return sum(count for end, count in run["ends"].items() if end.split()[1] == code)


def gate_cpu(results: Results) -> str:
    """What the gate between fetching and computing decides, by measured rate of prefill."""
    rows = [
        [whole(row["token_bytes"]), whole(row["prefill_tokens_per_second"]), "fetches" if row["fetch"] else "computes"]
        for row in results["prefix-cpu"]["gate"]
    ]
    return table(["bytes of keys and values a token", "prefill, tokens/s", "the gate"], rows)


def next_day(results: Results) -> str:
    """vLLM's requests a second in the 1,024 requests of 128 tokens, a day later."""
    return " and ".join(str(row["requests_per_second"]) for row in results["streams-h100"]["throughput"])


def stored(results: Results, what: str, quantile: str) -> str:
    """An answer of 64 tokens, ms."""
    return fixed(results["cache-cpu"]["figures"][f"answer of 64 tokens, {what}"][quantile])


PROPOSERS = {"prompt_lookup": "prompt lookup", "draft_model": "demo draft", "both": "both"}
TEXTS = {
    "edit": "a file, and the same again",
    "quote": "a passage, quoted",
    "code": "code, gone on with",
    "prose": "prose, gone on with",
    "chat": "a question",
}


def speculation(results: Results, name: str) -> str:
    """What each proposer makes of each set of prompts, one stream; with the share of drafted tokens that was right."""
    alone = [one for one in results[name] if one.get("streams") == 1 and one["k"] is None]
    found = {(one["proposer"], one["prompts"]): one for one in alone}
    used = [who for who in PROPOSERS if any(who == proposer for proposer, _ in found)]

    def cell(who: str, text: str) -> str:
        one = found.get((who, text))
        return "" if one is None else f"{fixed(one['ratio'], 2)} · {percent(one['acceptance'])} %"

    rows = [(said, *(cell(who, text) for who in used)) for text, said in TEXTS.items()]
    return table(["", *(PROPOSERS[who] for who in used)], rows)


def depths_cpu(results: Results) -> str:
    """Drafts of k tokens always: measured, and foretold from acceptance and costs."""
    rows = []
    for who in ("prompt_lookup", "draft_model"):
        of_who = {one["k"]: one for one in results["speculation-cpu"] if one["proposer"] == who and one["k"]}
        cells = (f"{fixed(one['ratio'], 2)} ({fixed(one['predicted_ratio'], 2)})" for _, one in sorted(of_who.items()))
        rows.append((PROPOSERS[who], *cells))
    return table(["", *map(str, range(1, 8))], rows)


RENDERERS: Mapping[str, Renderer] = {
    "readme": readme,
    "decode-h100": decode_h100,
    "peers-h100": peers_h100,
    "published": published,
    "streams-h100": streams_h100,
    "first-h100": first_h100,
    "throughput-h100": throughput_h100,
    "engine-cpu": engine_cpu,
    "front-cpu": front_cpu,
    "quantized-cpu": quantized_cpu,
    "quality-cpu": quality_cpu,
    "lookups-cpu": lookups_cpu,
    "pairs-cpu": pairs_cpu,
    "faults-cpu": faults_cpu,
    "prefix-cpu": prefix_cpu,
    "trace-cpu": trace_cpu,
    "gate-cpu": gate_cpu,
    "soaking-cpu": soaking,
    "speculation-cpu": lambda r: speculation(r, "speculation-cpu"),
    "speculation-h100": lambda r: speculation(r, "speculation-h100"),
    "depths-cpu": depths_cpu,
    "throughput.next-day": next_day,
    "engine.many": lambda r: many_cpu(r, 16),
    "engine.most": lambda r: many_cpu(r, 64),
    "engine.revision": lambda r: str(r["engine-cpu"]["sha"]),
    "front.revision": lambda r: str(r["front-cpu"].get("sha") or r["front-cpu"]["git"]),
    "front.event": lambda r: fixed(r["front-cpu"]["figures"]["engine event to client bytes, ms"]["p50"], 2),
    "front.unary": lambda r: fixed(r["front-cpu"]["figures"]["unary of one token, ms"]["p50"]),
    "front.neighbours": lambda r: fixed(
        r["front-cpu"]["figures"]["neighbours of readers that never read"]["slower_percent"]
    ),
    "quality.tokens": lambda r: whole(r["quality-cpu"]["figures"]["whippet-awq-32"]["tokens"]),
    "quality.revision": lambda r: str(r["quality-cpu"]["commit"]),
    "constraints.answers": lambda r: "{valid} of {finished}".format(**r["constraints-cpu"][0]),
    "constraints.gain": lambda r: f"{r['constraints-cpu'][0]['tokens'] / r['constraints-cpu'][0]['steps']:.1f}",
    "quantized.revision": lambda r: str(r["quantized-cpu"]["sha"]),
    "cache.entries": lambda r: whole(r["cache-cpu"]["entries"]),
    "cache.revision": lambda r: str(r["cache-cpu"]["lookups_sha"]),
    "cache.stored": lambda r: stored(r, "stored", "p50"),
    "cache.generated": lambda r: stored(r, "generated", "p50"),
    "faults.requests": lambda r: whole(r["cache-faults-cpu"]["figures"]["well"]["count"]),
    "faults.revision": lambda r: str(r["cache-faults-cpu"]["sha"]),
    "prefix.revision": lambda r: str(r["prefix-cpu"]["sha"]),
    "soak.answers": lambda r: whole(soak(r, "answers")),
    "soak.tokens": lambda r: f"{soak(r, 'tokens') / 1e6:.1f}",
    "soak.left": lambda r: whole(soak(r, "left")),
    "soak.changed": lambda r: whole(soak(r, "changed")),
    "soaking.revision": lambda r: ", ".join(str(run["revision"]) for run in r["soaking-cpu"]),
    "soak.revision": lambda r: str(r["soak-h100"][0]["revision"]),
}
