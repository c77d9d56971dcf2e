"""Sends malformed HTTP/2, seeded and bounded: frames of any type, length and flags, floods of those that cost their
receiver something, invalid header blocks, and valid calls with bytes changed.

    python -m bench.fuzzed_frames ADDRESS [--seconds 60] [--seed N] [--tls]

sends them to a running server for so long, and prints the seed of each round. `CONVERSATIONS` are what tests send.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import hpack

from bench.floods import GENERATE, HEALTH, REFLECTION
from bench.grpc_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

MOST = 1 << 18  # bytes of one conversation
_PATIENCE = 0.5  # seconds that a server may leave a socket full
_LISTEN = 0.05  # seconds without a word after which we hang up
_LARGEST = (1 << 31) - 1
_HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")
_HEADERS_PRIORITY = 0x20

Random = random.Random
Conversation = Callable[[Random], bytes]


@functools.cache
def headers(path: str = GENERATE) -> bytes:
    """Returns the header block of a call; for a connection without a table."""
    block = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    return bytes(hpack.Encoder().encode(block))


def literal(name: bytes, value: bytes, *, kept: bool = False) -> bytes:
    """Returns a further header, kept in the table or not."""
    return (b"\x40" if kept else b"\x00") + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    frames, number = bytearray([127]), number - 127
    while number >= 128:
        frames.append(number & 127 | 128)
        number >>= 7
    return bytes([*frames, number])


def opened(stream: int, path: str = GENERATE) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, headers(path))


def message(rng: Random) -> bytes:
    """Makes a gRPC message with arbitrary length and compression fields."""
    body = rng.randbytes(rng.randrange(200))
    frames = rng.choice([len(body), 0, len(body) + 1, _LARGEST, 2 * _LARGEST + 1])
    return struct.pack(">BI", rng.choice([0, 0, 0, 1, 255]), frames) + body


def any_frames(rng: Random) -> bytes:
    """Makes frames of any type, on any stream, with any flags; some declare a wrong length."""
    frames = _HELLO
    for _ in range(rng.randrange(1, 60)):
        payload = rng.randbytes(rng.choice([0, 1, 4, 5, 6, 8, 9, rng.randrange(300), 16_384]))
        stream = rng.choice([0, 1, 1, 3, 5, 2, _LARGEST, rng.getrandbits(32)])
        whole = frame(rng.choice([*range(10), rng.randrange(256)]), rng.getrandbits(8), stream, payload)
        if rng.random() < 0.1:
            whole = struct.pack(">I", rng.getrandbits(24))[1:] + whole[3:]
        frames += whole
    return frames


def padded(rng: Random) -> bytes:
    frames = _HELLO
    for at in range(20):
        block = headers()
        pad = rng.choice([0, 1, 255, len(block), rng.randrange(256)])
        frames += frame(HEADERS, END_HEADERS | PADDED, 2 * at + 1, bytes([pad]) + block + bytes(rng.choice([pad, 0])))
        frames += frame(DATA, PADDED, 2 * at + 1, bytes([rng.randrange(256)]) + bytes(rng.randrange(300)))
    return frames


def continuations(rng: Random) -> bytes:
    """Makes header blocks without an end: of empty frames, of small ones, of large ones, or broken off by another
    frame."""
    size = rng.choice([0, 1, 100, 16_384])
    count = min(20_000, MOST // (size + 9)) if rng.random() < 0.8 else rng.randrange(5)
    frames = _HELLO + frame(HEADERS, 0, 1, headers())
    frames += b"".join(frame(CONTINUATION, 0, 1, rng.randbytes(size)) for _ in range(count - 1))
    return frames + rng.choice([b"", frame(PING, 0, 0, bytes(8)), frame(CONTINUATION, END_HEADERS, 3, b""), opened(3)])


def settings(rng: Random) -> bytes:
    """Makes any number of settings, with any value; thousands of frames, unrequested acknowledgements among them."""
    known = [0, 1, 2, 3, 4, 5, 6, 8, 0xFE03, rng.getrandbits(16)]
    values = [0, 1, 16_383, 16_384, 65_535, 1 << 24, _LARGEST, 1 << 31, (1 << 32) - 1, rng.getrandbits(32)]
    frames = [_HELLO, opened(1)]
    for _ in range(rng.choice([20, 5_000])):
        pairs = b"".join(struct.pack(">HI", rng.choice(known), rng.choice(values)) for _ in range(rng.randrange(4)))
        frames.append(frame(SETTINGS, rng.choice([0, 0, 0, ACK]), rng.choice([0] * 20 + [1]), pairs))
    return b"".join(frames) + frame(SETTINGS, 0, 0, b"short")


def harmless_settings(rng: Random) -> bytes:
    """Makes settings that must all be acknowledged, and each moves the window of every stream."""
    frames = [_HELLO, *(opened(2 * at + 1) for at in range(100))]
    window = (struct.pack(">HI", 4, rng.choice([0, 1, 65_535, _LARGEST])) for _ in range(5_000))
    return b"".join([*frames, *(frame(SETTINGS, 0, 0, one) for one in window)])


def pings(rng: Random) -> bytes:
    frames = b"".join(frame(PING, 0, 0, rng.randbytes(8)) for _ in range(10_000))
    return _HELLO + frames + frame(PING, rng.choice([0, ACK]), 0, bytes(rng.randrange(20)))


def windows(rng: Random) -> bytes:
    """Makes window updates beyond the largest window, by nothing, and on streams that do not exist."""
    frames = [_HELLO, opened(1)]
    for _ in range(rng.choice([10, 10_000])):
        grow = rng.choice([0, 1, 1, 1, _LARGEST - 65_535, _LARGEST, 1 << 31])
        frames.append(frame(WINDOW_UPDATE, 0, rng.choice([0, 1, 1, 3]), struct.pack(">I", grow)))
    return b"".join(frames)


def header_blocks(rng: Random) -> bytes:
    """Makes invalid header blocks: any bytes, table sizes, integers and indices beyond all bounds, broken Huffman
    code."""
    frames = _HELLO
    for at in range(rng.randrange(1, 20)):
        block = rng.choice(
            [
                rng.randbytes(rng.randrange(400)),
                b"\x3f" + b"\xff" * rng.randrange(12) + b"\x7f",  # a table size
                b"\xff" + b"\xff" * rng.randrange(12) + b"\x7f",  # an index
                b"\x00\x7f" + b"\xff" * 4 + b"\x0f",  # a name's length
                b"\x40\x8a" + b"\xff" * 10 + b"\x85" + rng.randbytes(5),  # Huffman code
                headers() + b"\x80",
                headers()[: rng.randrange(60)],
                headers() + literal(b"x" * rng.randrange(9_000), b"y" * rng.randrange(9_000)),
                headers() + literal(b"grpc-timeout", rng.choice([b"", b"1", b"99999999999H", b"-1S", b"\xff"])),
                headers() + literal(b":path", b"/") + literal(b"Connection", b"close"),
                headers() + literal(rng.choice([b"grpc-encoding", b"content-length", b"x-bin"]), rng.randbytes(9)),
            ]
        )
        frames += frame(HEADERS, rng.choice([END_HEADERS, END_HEADERS | END_STREAM]), 2 * at + 1, block[:16_384])
    return frames


def header_bombs(rng: Random) -> bytes:
    """Makes one large entry of the table, named a thousand times in each block."""
    frames = _HELLO + frame(HEADERS, END_HEADERS, 1, headers() + literal(b"x", b"z" * 3_950, kept=True))
    for at in range(1, rng.choice([3, 14])):
        frames += frame(HEADERS, END_HEADERS, 2 * at + 1, headers() + b"\xbe" * 15_000)
    return frames


def resets(rng: Random) -> bytes:
    """Makes calls that end as they begin, by either side's fault, and resets of streams that never existed."""
    frames = [_HELLO]
    for at in range(1_500):
        stream = 2 * at + 1
        frames.append(opened(stream, rng.choice([GENERATE, HEALTH, REFLECTION, "/no/such"])))
        wrong = frame(DATA, 0, stream, bytes(rng.randrange(3))) + frame(WINDOW_UPDATE, 0, stream, bytes(4))
        right = frame(RST_STREAM, 0, stream, struct.pack(">I", rng.choice([0, 8, rng.getrandbits(32)])))
        frames.append(rng.choice([right, right, wrong]))
    return b"".join(frames) + frame(RST_STREAM, 0, rng.choice([0, 9_999, 2]), bytes(rng.choice([3, 4])))


def streams(rng: Random) -> bytes:
    """Makes stream ids that fall, repeat, are even, or leave none for later ones; more than allowed."""
    ids = [1, 3, 3, 2, 1, 9, 7, _LARGEST, _LARGEST - 2, *(2 * at + 11 for at in range(600))]
    if rng.random() < 0.5:
        rng.shuffle(ids)
    return _HELLO + b"".join(opened(stream) for stream in ids)


def servers_frames(rng: Random) -> bytes:
    """Makes frames that only servers may send, or no side: promises, GOAWAY, priorities that depend on themselves, and
    newer frames."""
    frames = _HELLO + opened(1)
    for _ in range(30):
        frames += rng.choice(
            [
                frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">I", 2) + headers()),
                frame(GOAWAY, 0, 0, struct.pack(">II", rng.getrandbits(31), rng.getrandbits(32)) + rng.randbytes(50)),
                frame(PRIORITY, 0, 1, struct.pack(">IB", 1, 255)),
                frame(HEADERS, END_HEADERS | _HEADERS_PRIORITY, 3, struct.pack(">IB", 3, 0) + headers()),
                frame(rng.choice([10, 12, 16]), 0, 0, rng.randbytes(40)),
            ]
        )
    return frames


def other_protocols(rng: Random) -> bytes:
    """Makes bytes of other protocols, or nearly HTTP/2."""
    cut = rng.randrange(len(PREFACE))
    return rng.choice(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n" * 50,
            PREFACE[:cut] + rng.randbytes(20) + PREFACE[cut:],
            PREFACE[:cut],
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            rng.randbytes(5_000),
            PREFACE + opened(1),  # without settings
            PREFACE * 3,
        ]
    )


def messages(rng: Random) -> bytes:
    """Makes valid calls with invalid messages: wrong lengths, more than the window, trailers, data after the end."""
    frames = _HELLO
    for at in range(rng.randrange(1, 30)):
        stream = 2 * at + 1
        frames += opened(stream, rng.choice([GENERATE, GENERATE + "Stream", HEALTH, REFLECTION]))
        for _ in range(rng.randrange(4)):
            frames += frame(DATA, rng.choice([0, 0, END_STREAM]), stream, message(rng))
        if rng.random() < 0.1:
            frames += b"".join(frame(DATA, 0, stream, bytes(16_384)) for _ in range(8))
        if rng.random() < 0.3:
            frames += frame(HEADERS, END_HEADERS | END_STREAM, stream, headers())
    return frames


def changed(rng: Random) -> bytes:
    """Makes a valid call with some bits turned, bytes left out or put in."""
    body = struct.pack(">BI", 0, 9) + b"\x1a\x01x\x2a\x04\x08\x02\x10\x01"
    frames = bytearray(_HELLO + b"".join(opened(s) + frame(DATA, END_STREAM, s, body) for s in (1, 3, 5)))
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(PREFACE), len(frames))
        what = rng.randrange(3)
        if what == 0:
            frames[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del frames[at : at + rng.randrange(1, 9)]
        else:
            frames[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(frames)


def no_window(rng: Random) -> bytes:
    body = struct.pack(">BI", 0, 10) + b"\x1a\x01x\x2a\x05\x08\xc8\x01\x10\x01"
    frames = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, rng.choice([0, 1, 20])))
    return frames + b"".join(
        opened(2 * at + 1, GENERATE + "Stream") + frame(DATA, END_STREAM, 2 * at + 1, body) for at in range(40)
    )


CONVERSATIONS: tuple[Conversation, ...] = (
    any_frames,
    changed,
    continuations,
    harmless_settings,
    header_blocks,
    header_bombs,
    messages,
    no_window,
    other_protocols,
    padded,
    pings,
    resets,
    servers_frames,
    settings,
    streams,
    windows,
)


def say(address: str, frames: bytes, tls: bool) -> None:
    """Sends the frames on a connection of its own, reads until the server is silent, and hangs up."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        link = socket.create_connection((host, int(port)), 5.0)
        if tls:
            link = _trusting().wrap_socket(link)
        with link:
            link.settimeout(_PATIENCE)
            with contextlib.suppress(OSError):  # the server may hang up in the middle, or take no more
                link.sendall(frames)
            link.settimeout(_LISTEN)
            heard = 0
            while heard < 4 * MOST and (more := link.recv(1 << 16)):
                heard += len(more)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def round_of(address: str, seed: int, tls: bool) -> None:
    """Runs every conversation once, four at a time."""
    with ThreadPoolExecutor(4) as pool:
        rng = Random(seed)
        for talk in rng.sample(CONVERSATIONS, len(CONVERSATIONS)):
            pool.submit(say, address, talk(Random(rng.getrandbits(64))), tls).add_done_callback(
                lambda one: one.result()
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--tls", action="store_true")
    flags = parser.parse_args()
    end, seed = time.monotonic() + flags.seconds, flags.seed
    while time.monotonic() < end:
        sys.stdout.write(f"seed {seed}\n")
        round_of(flags.address, seed, flags.tls)
        seed += 1


if __name__ == "__main__":
    main()
