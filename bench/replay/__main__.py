"""`whippet cache replay`: runs traces through the caches and prints what they would have saved, and how often wrongly.

Nothing leaves this process: the stores are in memory, and questions are answered with their own labels.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.replay.answers import lines, replay_cosine, replay_exact, replay_semantic
from bench.replay.prefix import LruBlocks, replay_prefix
from bench.replay.traces import read_blocks, read_labelled
from cache.answers.exact import ExactCache
from cache.api import Mode, ModelIdentity, ResponseSettings, SemanticSettings
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions
from cache.semantic.embedder import open_embedder
from cache.semantic.export import ExportFailed, exported, missing
from cache.semantic.search import SimilarCache
from cache.store.memory import MemoryStore

_STOPPED = 130  # as a shell says that ctrl-C ended a command
_MEMORY = 4 * 2**30  # bytes; room for a whole trace


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a report a trace. 2 where a file is not what it should be, 1 where the embedder is missing."""
    flags = _parser().parse_args(argv)
    if not flags.blocks and not flags.questions:
        sys.stderr.write("whippet cache replay: name a trace: --blocks FILE, --questions FILE\n")
        return 2
    try:
        for path in flags.blocks:
            _say(_blocks(path, flags.capacity, flags.limit))
        for path in flags.questions:
            _say(asyncio.run(_questions(path, flags)))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"whippet cache replay: {' '.join(str(error).split())}\n")
        return 2
    except ExportFailed as error:
        sys.stderr.write(f"whippet cache replay: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _STOPPED
    return 0


def _say(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whippet cache",
        description="Runs traces through the caches: hit rates by kind, false hits with their 95 % interval, latency "
        "by length. A false hit is one on a question of another label.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("replay",))
    parser.add_argument(
        "--blocks", action="append", default=[], type=Path, metavar="FILE", help="prompts as blocks, Mooncake's format"
    )
    parser.add_argument(
        "--capacity",
        type=_count,
        action="append",
        metavar="BLOCKS",
        help="of the prefix cache; 1000, 5000, 20000",
    )
    parser.add_argument(
        "--questions", action="append", default=[], type=Path, metavar="FILE", help="labelled ones, CLINC150's format"
    )
    parser.add_argument("--part", action="append", metavar="NAME", help="of a file of questions; default: test")
    parser.add_argument("--mode", choices=("shadow", "on"), default="on", help="of the semantic cache")
    parser.add_argument("--threshold", type=float, default=0.90, help="cosine that evidence is collected from")
    parser.add_argument("--cosine", action="store_true", help="beside it, what the threshold alone would do")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of the embedder; default: the installed one")
    parser.add_argument("--limit", type=_count, metavar="COUNT", help="requests of each trace")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _blocks(path: Path, capacities: list[int] | None, limit: int | None) -> list[str]:
    requests = read_blocks(path)[:limit]
    if not requests:
        raise ValueError(f"{path}: no requests")
    found = lines(f"{path.name}: whole prompts", asyncio.run(replay_exact(requests, _exact())))
    for capacity in (*(capacities or (1000, 5000, 20_000)), None):
        report = replay_prefix(requests, LruBlocks(capacity))
        size = "all blocks" if capacity is None else f"{capacity} blocks"
        beyond = (
            f", {100 * report.rate_beyond_head:.2f} % beyond the first that all share" if report.shared_head else ""
        )
        found.append(f"{path.name}: prefixes, room for {size}: {100 * report.rate:.2f} % of blocks hit{beyond}")
    return found


async def _questions(path: Path, flags: argparse.Namespace) -> list[str]:
    questions = read_labelled(path, tuple(flags.part or ("test",)))[: flags.limit]
    if absent := missing(flags.model):
        raise ExportFailed(f"{', '.join(absent)} is not installed: in a checkout pip install -e '.[embed]'")
    embedder = open_embedder(exported(flags.model))
    settings = SemanticSettings(
        mode=Mode(flags.mode),
        threshold=flags.threshold,
        strict_threshold=min(SemanticSettings().strict_threshold, flags.threshold),
        max_entries=max(1, len(questions)),
    )
    # An hour passes between observations, because evidence counts a limited number per day and must be a day old.
    clock = itertools.count(0.0, 3600.0).__next__
    cache = SimilarCache(_context(), embedder, settings, clock=clock)
    try:
        found = lines(f"{path.name}: semantic, {flags.mode}", await replay_semantic(questions, cache, embedder))
    finally:
        await cache.aclose()
    if flags.cosine:
        report = replay_cosine(questions, embedder, flags.threshold)
        found += lines(f"{path.name}: cosine {flags.threshold:.2f} alone", report)
    return found


def _exact() -> ExactCache:
    return ExactCache(_context(), ResponseSettings())


def _context() -> CacheContext:
    counter, keyring, store = Counters(), Keyring.generate(), MemoryStore(_MEMORY)
    partitions = Partitions(keyring, ModelIdentity(weights="replay", tokenizer="replay"))
    return CacheContext(store, partitions, Epochs(store, partitions), Envelope(keyring, 1 << 20, counter), counter)


if __name__ == "__main__":
    sys.exit(main())
