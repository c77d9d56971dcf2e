"""What traces cost the front: processor time of a call with none, one in a hundred and all of them traced, in turn on
three servers. The collector is one of ours, which takes what it is sent and keeps nothing. Ends in one JSON line.

A call is unary and of one token: the shortest there is, so that what a trace costs shows most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc

from bench.front import UNARY, WIDE, server
from bench.grpc_frames import FrameClient
from bench.own_server import cpu_seconds
from service.pb.whippet.v1 import generation_pb2 as pb

_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
_AT_ONCE = 32
SHARES = (None, 0.01, 1.0)  # None: traces are off


def collector() -> tuple[grpc.Server, str]:
    """Takes everything."""
    handler = grpc.unary_unary_rpc_method_handler(lambda data, context: b"")
    taking = grpc.server(ThreadPoolExecutor(1))
    taking.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT, {"Export": handler}),))
    port = taking.add_insecure_port("127.0.0.1:0")
    taking.start()
    return taking, f"http://127.0.0.1:{port}"


def calls(address: str, pid: int, count: int) -> float:
    """Microseconds of the front's processor time for each of so many calls, 32 at once."""
    client = FrameClient(address, time.monotonic)
    message = pb.GenerateRequest(text="bench")
    message.stopping.max_tokens = 1
    data, begun, cpu = message.SerializeToString(), 0, cpu_seconds(pid)
    while client.ended < count:
        while begun < count and begun - client.ended < _AT_ONCE:
            client.start(UNARY, data)
            begun += 1
        client.read()
    used = cpu_seconds(pid) - cpu
    client.close()
    return used / count * 1e6


def measure(rounds: int, count: int) -> dict[str, list[float]]:
    """By share, each round's."""
    found: dict[str, list[float]] = {}
    taking, endpoint = collector()
    with ExitStack() as stack:
        servers = {}
        for share in SHARES:
            flags = () if share is None else (f"--traces.endpoint={endpoint}", f"--traces.sample={share}")
            servers["off" if share is None else f"{share:g}"] = stack.enter_context(server(*WIDE, *flags))
        for number in range(rounds + 1):  # the first is for warming up
            for name, (address, pid) in servers.items():
                took = calls(address, pid, count)
                if number:
                    found.setdefault(name, []).append(took)
    taking.stop(None).wait()
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    found = measure(options.rounds, options.calls)
    best = {name: min(values) for name, values in found.items()}
    for name, value in best.items():
        print(f"{name:6} {value:7.1f} us a call  {100 * (value / best['off'] - 1):+.1f} %  (of {found[name]})")
    sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"bench": "traces", "git": sha.stdout.strip(), "device": device, "us_a_call": best}))


if __name__ == "__main__":
    main()
