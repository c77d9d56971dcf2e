"""Damaged GGUF files, thousands of them: each is read or refused by a line that names the fault, in a process whose
memory is bounded."""

from __future__ import annotations

import itertools
import math
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from quant.checkpoint.gguf.header import MAX_STRINGS
from tests.quant.checkpoint.gguf.test_header import ARRAY, STRING, U32, file_of, key, tensor, text
from tests.quant.gguf_files import write_model

FLOAT = 6

ROUNDS = 4000
MEMORY = 700 << 20  # bytes of heap and mappings, of which torch and its libraries take half
PROGRAM = """
import random, resource, struct, sys, time
from pathlib import Path
import torch
from tokenizers import Tokenizer
from quant.checkpoint.errors import CheckpointError
from quant.checkpoint.formats import read_spec
from quant.checkpoint.gguf.file import gguf_file
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.linear import read_linear
from quant.checkpoint.tensors import linears

source, seed, rounds, memory = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
whole, dice = source.read_bytes(), random.Random(seed)
header = whole.index(b"token_embd.weight") + 8192  # most damage goes where it is read
path = source.with_name(f"damaged-{seed}.gguf")
tokens = whole.index(b"tokenizer.ggml.tokens")
resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def damage():
    data = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at = dice.randrange(dice.choice((400, tokens, header, len(data))))
        match dice.randrange(6):
            case 0:
                count = dice.choice((0, 1, 1 << 31, 1 << 32, (1 << 64) - 1, 1 << dice.randrange(64)))
                data[at : at + 8] = struct.pack("<Q", count)
            case 1:
                data[at : at + 4] = struct.pack("<I", dice.choice((0, 1, 8, 9, 0xFFFFFFFF, dice.randrange(1 << 32))))
            case 2:
                del data[at : at + dice.randrange(1, 64)]
            case 3:
                data[at:at] = dice.randbytes(dice.randrange(1, 64))
            case 4:
                del data[max(at, 30) :]
            case _:
                data[at % len(data)] ^= 1 << dice.randrange(8)
        data = data or bytearray(b"G")
    return data


taken = refused = slowest = 0
for _ in range(rounds):
    path.write_bytes(damage())
    before = time.process_time()
    try:
        read = gguf_file(path)
        Tokenizer.from_str(read.texts["tokenizer.json"].decode())
        spec, tensors = read_spec(path), GgufTensors(path)
        for name, (inputs, outputs), _ in linears(read.config):
            read_linear(tensors, name, spec, inputs, outputs).weight.dequantize(torch.float32)
        tensors.tensor("model.embed_tokens.weight")
        tensors.close()
        taken += 1
    except CheckpointError as error:
        assert "\\n" not in str(error) and len(str(error)) < 2000, error
        refused += 1
    slowest = max(slowest, time.process_time() - before)
path.unlink()
print(taken, refused, round(slowest, 2))
assert taken and refused > taken / 10
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_damage_is_taken_or_refused(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kinds = {"embed": "Q8_0", "v_proj": "Q6_K", "o_proj": "Q4_0", "down": "Q4_1", "": "Q4_K"}
    write_model(path, "llama3-rope", kinds, num_hidden_layers=1, intermediate_size=256)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(seed), str(ROUNDS), str(MEMORY)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


READ = """
import resource, sys, time
from pathlib import Path
from quant.checkpoint.errors import BadFile
from quant.checkpoint.gguf.file import gguf_file

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), int(sys.argv[2])))
try:
    print(len(gguf_file(Path(sys.argv[1])).texts["tokenizer.json"]))
except BadFile as error:
    print(error)
print(time.process_time())
"""
LARGEST = MAX_STRINGS - 8  # texts
HEADER_MEMORY = 448 << 20  # bytes
HEADER_SECONDS = 60.0  # of a processor; a tenth of it on one that is not busy


def largest(path: Path, keys: tuple[bytes, ...]) -> None:
    """A model of one layer of two numbers whose header is as large as is read, by its vocabulary."""
    sizes = {"block_count": 1, "context_length": 128, "embedding_length": 2, "feed_forward_length": 2}
    own = [key("general.architecture", STRING, text("llama")), key("llama.attention.head_count", U32, b"\1\0\0\0")]
    own += [key(f"llama.{name}", U32, struct.pack("<I", size)) for name, size in sizes.items()]
    own.append(key("llama.attention.layer_norm_rms_epsilon", FLOAT, struct.pack("<f", 1e-5)))
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd.weight": (2, LARGEST), "output_norm.weight": (2,)}
    shapes |= {f"blk.0.{part}.weight": (2,) if part.endswith("norm") else (2, 2) for part in parts}
    at, tensors = 0, []
    for name, sides in shapes.items():
        tensors.append(tensor(name, sides, 0, at))
        at += -(-4 * math.prod(sides) // 32) * 32
    path.write_bytes(file_of((*own, *keys), tuple(tensors), at))


def texts(values: Iterable[str]) -> bytes:
    held = [text(value) for value in values]
    return struct.pack("<IQ", STRING, len(held)) + b"".join(held)


def pieces() -> tuple[bytes, ...]:
    """Each can be made of shorter ones in many ways."""
    words = ("".join(letters) for length in range(1, 21) for letters in itertools.product("ab", repeat=length))
    scores = struct.pack("<IQ", FLOAT, LARGEST) + struct.pack(f"<{LARGEST}f", *range(LARGEST))
    return (
        key("tokenizer.ggml.model", STRING, text("llama")),
        key("tokenizer.ggml.tokens", ARRAY, texts(itertools.islice(words, LARGEST))),
        key("tokenizer.ggml.scores", ARRAY, scores),
    )


def pairs() -> tuple[bytes, ...]:
    half = LARGEST // 2
    return (
        key("tokenizer.ggml.model", STRING, text("gpt2")),
        key("tokenizer.ggml.pre", STRING, text("gpt-2")),
        key("tokenizer.ggml.tokens", ARRAY, texts(["a", "b", "ab", *(f"{number:022x}" for number in range(half - 3))])),
        key("tokenizer.ggml.merges", ARRAY, texts(["a b"] * half)),
    )


@pytest.mark.parametrize(
    ("keys", "told"), [(pieces, "tokenizer.ggml.tokens: has pieces longer"), (pairs, "")], ids=["pieces", "pairs"]
)
def test_the_largest_headers_stay_within_bounds(
    keys: Callable[[], tuple[bytes, ...]], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    largest(path, keys())
    command = [sys.executable, "-c", READ, str(path), str(HEADER_MEMORY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said, seconds = done.stdout.strip().splitlines()
    assert told in said
    assert float(seconds) < HEADER_SECONDS
