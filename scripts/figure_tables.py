"""Lists the renderers that `scripts.figures` fills markers with: from result files to Markdown.

Missing figures stay empty cells: none is computed that was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from scripts.cells import fixed, whole
from scripts.figures_cpu import (
    cpu_peers,
    depths,
    engine_cpu,
    faults_cpu,
    flakes,
    front_cpu,
    gate_cpu,
    kept_cpu,
    lookups_cpu,
    many_cpu,
    overload,
    pairs_cpu,
    prefix_cpu,
    quality_cpu,
    quantized_cpu,
    soak,
    soaking,
    speculation,
    stored,
    trace_cpu,
    two_fronts_cpu,
)
from scripts.figures_gpu import (
    decode_h100,
    first_h100,
    kept_h100,
    newest_vllm,
    next_day,
    peers_h100,
    peers_h200,
    published,
    streams_h100,
    summary_h100,
    throughput_h100,
)
from scripts.pictures import one_stream
from scripts.results import Renderer

# File → what draws it.
PICTURES: Mapping[str, Renderer] = {"docs/one-stream.svg": one_stream}
RENDERERS: Mapping[str, Renderer] = {
    "summary-h100": summary_h100,
    "decode-h100": decode_h100,
    "peers-h100": peers_h100,
    "peers-h200": peers_h200,
    "newest-vllm": newest_vllm,
    "published": published,
    "streams-h100": streams_h100,
    "first-h100": first_h100,
    "throughput-h100": throughput_h100,
    "engine-cpu": engine_cpu,
    "cpu-peers": cpu_peers,
    "front-cpu": front_cpu,
    "two-fronts-cpu": two_fronts_cpu,
    "quantized-cpu": quantized_cpu,
    "quality-cpu": quality_cpu,
    "kept-cpu": kept_cpu,
    "kept-h100": kept_h100,
    "lookups-cpu": lookups_cpu,
    "pairs-cpu": pairs_cpu,
    "faults-cpu": faults_cpu,
    "prefix-cpu": prefix_cpu,
    "trace-cpu": trace_cpu,
    "gate-cpu": gate_cpu,
    "overload-cpu": overload,
    "soaking-cpu": soaking,
    "flakes-cpu": flakes,
    "speculation-cpu": lambda r: speculation(r, "speculation-cpu"),
    "speculation-h100": lambda r: speculation(r, "speculation-h100"),
    "depths-cpu": lambda r: depths(r, "speculation-cpu"),
    "depths-h100": lambda r: depths(r, "speculation-h100"),
    "peers-h200.revision": lambda r: str(r["peers-h200"]["revision"]),
    "throughput.next-day": next_day,
    "engine.many": lambda r: many_cpu(r, 16),
    "engine.most": lambda r: many_cpu(r, 64),
    "peers-cpu.revision": lambda r: str(r["cpu-peers"]["sha"]),
    "peers-cpu.device": lambda r: str(r["cpu-peers"]["rows"][0]["device"]),
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
