"""Tables of what was measured without a GPU, and of what ran for long."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from scripts.cells import fixed, percent, rounded, signed, table, whole
from scripts.results import Results

# One machine without a GPU


def engine_cpu(results: Results) -> str:
    found = results["engine-cpu"]
    rows = [[name, whole(row["median"])] for name, row in found["tokens_per_second"].items()]
    rows += [[f"ratio, {name}", f"{row['median']:.2f}"] for name, row in found["ratios"].items()]
    return table(["", "tokens/s"], rows)


def cpu_peers(results: Results) -> str:
    """Renders decode of a small real model beside llama.cpp, by bits and streams: tokens/s, and milliseconds to a first
    one."""
    rows: dict[tuple[str, int], list[str]] = {}
    peers: dict[tuple[str, int], dict[str, Any]] = {}
    found = results["cpu-peers"]["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in found))
    for row in found:
        peers.setdefault((row["format"], row["streams"]), {})[row["engine"]] = row
    for key, of in peers.items():
        rates = [fixed(of[engine]["tokens_per_second"]) for engine in engines]
        ratio = of["walk in C"]["tokens_per_second"] / of["llama.cpp"]["tokens_per_second"]
        firsts = [of[engine]["ttft_ms"] for engine in ("walk in C", "llama.cpp")]
        rows[key] = [*rates, fixed(ratio, 2), "" if None in firsts else " / ".join(map(whole, firsts))]
    heads = ["", *(f"{engine}, tokens/s" for engine in engines), "times llama.cpp", "first token, ms: ours / llama.cpp"]
    return table(
        heads, [[f"{name}, {streams} stream{'s' * (streams > 1)}", *row] for (name, streams), row in rows.items()]
    )


def many_cpu(results: Results, streams: int) -> str:
    """Renders the ratio to transformers, which takes one stream after the other."""
    ratios = results["engine-many-cpu"]["ratios"]
    return fixed(next(row["median"] for name, row in ratios.items() if f" {streams} streams /" in name))


def front_cpu(results: Results) -> str:
    rows = []
    for name, row in results["front-cpu"]["figures"].items():
        if "messages_per_s" in row:
            rates = [whole(row["messages_per_s"]), whole(row["tokens_per_s"]), whole(row["front_us_per_message"])]
            rows.append([name, *rates])
    return table(["", "messages/s", "tokens/s", "CPU µs a message"], rows)


def two_fronts_cpu(results: Results) -> str:
    """Compares the front with earlier ones, newest first: their time per message relative to its own, and the newest
    one's own."""
    runs = results["two-fronts-cpu"]
    rows = []
    for name, row in runs[0]["figures"].items():
        found = [run["figures"][name] for run in runs]
        ratios = [f"{one['message']:.2f} ± {one['message_error']:.2f}" for one in found]
        rows.append([name, *ratios, whole(row["front_us_per_message"])])
    heads = [f"{run['before']}, {run['git']}" for run in runs]
    return table(["", *heads, f"µs a message, {runs[0]['git']}"], rows)


def quantized_cpu(results: Results) -> str:
    rows = []
    for name, row in results["quantized-cpu"]["tokens_per_second"].items():
        size = row["weights_bytes"] / 2**20
        rows.append(
            [name, fixed(row["median"]), fixed(row["of_bfloat16"], 2), fixed(row["of_float32"], 2), whole(size)]
        )
    return table(["", "tokens/s", "of bfloat16", "of float32", "weights, MiB"], rows)


def quality_cpu(results: Results) -> str:
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


def kept_cpu(results: Results) -> str:
    """Renders the cost of fp8 keys and values for the demo model, by the type of all other arithmetic."""
    rows = []
    for run in results["kept-cpu"]:
        value, low, high = run["perplexity_change"]
        cells = [f"{signed(value)} % ({signed(low)} to {signed(high)})", f"{run['kl']:.4f}"]
        largest = " and ".join(fixed(most) for most in run["largest"])
        rows.append([run["dtype"], *cells, percent(run["agreement"], 1) + " %", largest, run["revision"]])
    head = ["arithmetic", "perplexity (95 % interval)", "mean KL, nats", "same first choice", "largest key and value"]
    return table([*head, "commit"], rows)


# Caches


def lookups_cpu(results: Results) -> str:
    figures = results["cache-cpu"]["figures"]
    lengths = [name.removeprefix("lookup, idle, ") for name in figures if name.startswith("lookup, idle, ")]
    rows = []
    for length in lengths:
        idle, busy = figures[f"lookup, idle, {length}"], figures[f"lookup, generating, {length}"]
        title = "CLINC150, " + length if "come" in length else length
        rows.append([title, fixed(idle["p50"]), fixed(idle["p95"]), fixed(busy["p50"]), fixed(busy["p95"])])
    return table(["question", "p50", "p95", "p50 while a model generates", "p95"], rows)


def pairs_cpu(results: Results) -> str:
    """Compares the guard of the semantic cache with a cosine threshold alone."""
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
    rows = [
        [whole(row["blocks"]), percent(row["device"], 2) + " %", percent(row["device_beyond_head"], 2) + " %"]
        for row in results["prefix-cpu"]["trace"]
    ]
    return table(["room for blocks", "blocks found", "without the first block, which all requests share"], rows)


def soak(results: Results, key: str) -> float:
    return float(max(results["soak-h100"], key=lambda run: run["seconds"])[key])


def overload(results: Results) -> str:
    rows = [
        [
            "at its peak" if "of_peak" not in run else "five times the peak",
            whole(run["output_tokens_per_second"]),
            *(whole(run[key]) for key in ("requests", "refused", "refused_without_retry_info")),
            ", ".join(fixed(run.get(f"refusal_ms_{share}")) for share in ("p50", "p95", "p99"))
            if run["refused"]
            else "",
            whole(run["accepted_not_ended_once"]),
        ]
        for run in results["overload-cpu"]
    ]
    head = ["", "tokens/s", "calls", "refused", "without a hint", "after ms, p50, p95, p99", "not ended once"]
    return table(head, rows)


def soaking(results: Results) -> str:
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


def flakes(results: Results) -> str:
    """Returns a row for each tier, number of hogs and commit."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for call in results["flakes-cpu"]:
        groups.setdefault((call["tier"], call["hogs"], call["revision"]), []).extend(call["runs"])
    rows = [
        [
            f"`make {tier}`",
            whole(hogs),
            commit,
            f"{sum(run['exit_code'] == 0 and not run['failures'] for run in runs)} of {len(runs)}",
            fixed(statistics.median(run["seconds"] for run in runs), 0),
            ", ".join(sorted({f"`{name.rpartition('::')[2]}`" for run in runs for name in run["failures"]})),
        ]
        for (tier, hogs, commit), runs in groups.items()
    ]
    return table(["", "hogs", "commit", "green", "seconds, median", "failed at least once"], rows)


def ended(run: Mapping[str, Any], code: str) -> int:
    """Counts requests of any kind that ended with a code."""
    return sum(count for end, count in run["ends"].items() if end.split()[1] == code)


def gate_cpu(results: Results) -> str:
    rows = [
        [whole(row["token_bytes"]), whole(row["prefill_tokens_per_second"]), "fetches" if row["fetch"] else "computes"]
        for row in results["prefix-cpu"]["gate"]
    ]
    return table(["bytes of keys and values a token", "prefill, tokens/s", "the gate"], rows)


def stored(results: Results, what: str, quantile: str) -> str:
    """Returns milliseconds for an answer of 64 tokens."""
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
    """Renders each proposer's ratio for each set of prompts, one stream; with the share of drafted tokens that was
    right."""
    alone = [one for one in results[name] if one.get("streams") == 1 and one["k"] is None]
    found = {(one["proposer"], one["prompts"]): one for one in alone}
    used = [who for who in PROPOSERS if any(who == proposer for proposer, _ in found)]

    def cell(who: str, text: str) -> str:
        one = found.get((who, text))
        return "" if one is None else f"{fixed(one['ratio'], 2)} · {percent(one['acceptance'])} %"

    rows = [(label, *(cell(who, text) for who in used)) for text, label in TEXTS.items()]
    return table(["", *(PROPOSERS[who] for who in used)], rows)


def depths(results: Results, name: str) -> str:
    """Renders drafts of always k tokens: measured, and predicted from acceptance and costs."""
    rows = []
    alone = [one for one in results[name] if one.get("streams") == 1 and one["k"]]
    for who in ("prompt_lookup", "draft_model"):
        of_who = {one["k"]: one for one in alone if one["proposer"] == who}
        cells = (f"{fixed(one['ratio'], 2)} ({fixed(one['predicted_ratio'], 2)})" for _, one in sorted(of_who.items()))
        rows.append((PROPOSERS[who], *cells))
    return table(["", *map(str, range(1, 8))], rows)
