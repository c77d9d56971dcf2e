"""Headers: what the `gguf` package writes is read back; whatever a file claims wrongly is refused by name."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from quant.checkpoint.errors import BadFile
from quant.checkpoint.gguf import header
from quant.checkpoint.gguf.header import read_header

U32, STRING, ARRAY, BOOL = 4, 8, 9, 7


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sides: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)


def file_of(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """`data`: bytes of numbers."""
    held, named = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, held, named) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "add_uint8": 200,
        "add_int8": -100,
        "add_uint16": 60000,
        "add_int16": -30000,
        "add_uint32": 4_000_000_000,
        "add_int32": -2_000_000_000,
        "add_uint64": 1 << 63,
        "add_int64": -(1 << 62),
        "add_float32": 0.5,
        "add_float64": 1 / 3,
        "add_bool": True,
        "add_string": "Grüße ▁",
    }
    for name, value in values.items():
        getattr(writer, name)(f"own.{name}", value)
    writer.add_array("own.texts", ["a", "", "日本"])
    writer.add_array("own.numbers", [1.5, 2.5])
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("rows", rows)
    writer.add_tensor("half", rows.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(path)
    for name, value in values.items():
        assert found.metadata[f"own.{name}"] == value
        assert type(found.metadata[f"own.{name}"]) is type(value)
    assert found.metadata["own.texts"] == ["a", "", "日本"]
    assert found.metadata["own.numbers"] == array("f", [1.5, 2.5])
    assert [(one.name, one.kind.name, one.shape) for one in found.tensors] == [
        ("rows", "F32", (2, 32)),
        ("half", "F16", (2, 32)),
    ]
    first = found.tensors[0]
    assert path.read_bytes()[first.start : first.start + first.size] == rows.tobytes()


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("one", np.ones(3, dtype=np.float32))
    writer.add_tensor("two", np.ones(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    one, two = read_header(path).tensors
    assert one.start % 256 == 0
    assert two.start == one.start + 256


ONE = tensor("one", (32,), 0, 0)
HUGE = 1 << 62
FAULTS: dict[str, tuple[bytes, str]] = {
    "no file of this kind": (b"PK\3\4" + bytes(40), "is no GGUF file"),
    "too short": (b"GGUF" + bytes(8), "is no GGUF file"),
    "version 1": (file_of(version=1), "has version 1"),
    "another byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "byte order"),
    "tensors without end": (file_of(counts=(HUGE, 0)), f"tensor count: {HUGE}"),
    "keys without end": (file_of(counts=(0, HUGE)), f"count of keys: {HUGE}"),
    "fewer keys than claimed": (
        file_of((key("a", U32, bytes(4)),), counts=(0, 9), alignment=1),
        "ends beyond the end of the file",
    ),
    "a key twice": (file_of((key("a.b", U32, bytes(4)),) * 2), "a.b is there twice"),
    "a long key": (file_of((key("k" * 300, U32, bytes(4)),)), "text of 300 bytes, 256 at most"),
    "a key that is no text": (file_of((text(b"\xff\xfe") + struct.pack("<II", U32, 0),)), "is not UTF-8"),
    "a text that is none": (file_of((key("a.b", STRING, text(b"\xff")),)), "a.b holds a text that is not UTF-8"),
    "a text without end": (file_of((key("a.b", STRING, struct.pack("<Q", HUGE)),)), f"a.b has a text of {HUGE} bytes"),
    "a text of two MiB": (file_of((key("a.b", STRING, text("x" * (2 << 20))),)), "a.b has a text of 2097152 bytes"),
    "an unknown type": (file_of((key("a.b", 77, bytes(8)),)), "a.b is of an unknown type, 77"),
    "neither true nor false": (file_of((key("a.b", BOOL, b"\2"),)), "a.b is neither true nor false but 2"),
    "arrays in arrays": (
        file_of((key("a.b", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U32, 1) + bytes(4)),)),
        "a.b holds arrays within an array",
    ),
    "an array of unknowns": (file_of((key("a.b", ARRAY, struct.pack("<IQ", 50, 1)),)), "a.b is of an unknown type, 50"),
    "numbers without end": (
        file_of((key("a.b", ARRAY, struct.pack("<IQ", U32, HUGE)),)),
        f"a.b claims {HUGE} numbers",
    ),
    "texts without end": (
        file_of((key("a.b", ARRAY, struct.pack("<IQ", STRING, HUGE)),)),
        f"a.b claims {HUGE} texts",
    ),
    "an array's text without end": (
        file_of((key("a.b", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE) + bytes(64)),)),
        "a.b ends beyond the end of the file",
    ),
    "no dimension": (file_of((), (tensor("one", (), 0, 0),), 128), "tensor one has 0 dimensions"),
    "five dimensions": (file_of((), (tensor("one", (1,) * 5, 0, 0),), 128), "tensor one has 5 dimensions"),
    "a side of nothing": (file_of((), (tensor("one", (32, 0), 0, 0),), 128), r"tensor one has sides \[32, 0\]"),
    "a side beyond all": (file_of((), (tensor("one", (HUGE, 4), 0, 0),), 128), "tensor one has sides"),
    "a product beyond 64 bits": (
        file_of((), (tensor("one", (1 << 30,) * 4, 0, 0),), 128),
        "tensor one ends beyond the end of the file",
    ),
    "half a block": (file_of((), (tensor("one", (33,), 3, 0),), 128), r"tensor one has sides \[33\], which Q4_1"),
    "a kind that is not served": (file_of((), (tensor("one", (256,), 10, 0),), 128), "tensor one is in Q2_K"),
    "a kind that is not known": (file_of((), (tensor("one", (256,), 999, 0),), 128), "tensor one is in type 999"),
    "a tensor beyond the end": (file_of((), (ONE,), 64), "tensor one ends beyond the end of the file"),
    "an offset beyond all": (file_of((), (tensor("one", (32,), 0, (1 << 64) - 32),), 128), "tensor one lies at offset"),
    "tensors that overlap": (
        file_of((), (ONE, tensor("two", (32,), 0, 64)), 512),
        "tensor two lies at offset 64, 128 expected",
    ),
    "a gap": (file_of((), (ONE, tensor("two", (32,), 0, 256)), 512), "tensor two lies at offset 256, 128 expected"),
    "no alignment": (file_of((), (tensor("one", (32,), 0, 7),), 512), "tensor one lies at offset 7"),
    "a tensor twice": (file_of((), (ONE, tensor("one", (32,), 0, 128)), 512), "tensor one is there twice"),
    "an alignment of nothing": (file_of((key("general.alignment", U32, bytes(4)),)), "general.alignment: must be"),
    "an odd alignment": (
        file_of((key("general.alignment", U32, struct.pack("<I", 24)),)),
        "general.alignment: must be a power of two",
    ),
    "an alignment beyond all": (
        file_of((key("general.alignment", U32, struct.pack("<I", 1 << 31)),)),
        "general.alignment: must be",
    ),
    "an alignment that is a text": (file_of((key("general.alignment", STRING, text("32")),)), "general.alignment"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    data, told = FAULTS[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(BadFile, match=told) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_a_sound_file_is_taken(tmp_path: Path) -> None:
    """So that the faults above are what is refused."""
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of((key("a.b", U32, bytes(4)),), (ONE, tensor("two", (32,), 0, 128)), 256))
    assert [one.name for one in read_header(path).tensors] == ["one", "two"]


def test_every_cut_is_refused(tmp_path: Path) -> None:
    texts = struct.pack("<IQ", STRING, 2) + text("ab") + text("c")
    whole = file_of((key("a.b", ARRAY, texts), key("c", STRING, text("d"))), (ONE,), 128)
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile):
            read_header(path)


def test_headers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER", 4096)
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of((key("a.b", STRING, text("x" * 5000)),)))
    with pytest.raises(BadFile, match=r"a\.b goes on beyond 0 MiB of header"):
        read_header(path)
    monkeypatch.setattr(header, "MAX_STRINGS", 3)
    several = struct.pack("<IQ", STRING, 2) + text("a") * 2
    path.write_bytes(file_of((key("a", ARRAY, several), key("b", ARRAY, several))))
    with pytest.raises(BadFile, match="b claims 2 texts, more than a model's file has"):
        read_header(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.mkdir(), lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "m.gguf")
    with pytest.raises(BadFile):
        read_header(tmp_path / "m.gguf")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no such file"):
        read_header(tmp_path / "m.gguf")


def test_damage_anywhere_is_taken_or_refused_within_bounds(tmp_path: Path) -> None:
    texts = struct.pack("<IQ", STRING, 40) + b"".join(text(f"token{number}") for number in range(40))
    keys = (
        key("a.b", ARRAY, texts),
        key("c", STRING, text("d")),
        key("n", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
    )
    whole = file_of(keys, (ONE, tensor("two", (64, 2), 3, 128)), 256)
    path, dice = tmp_path / "m.gguf", random.Random(11)
    taken, faults = 0, list[str]()
    tracemalloc.start()
    try:
        for _ in range(400):
            damaged = bytearray(whole)
            for _ in range(dice.choice((1, 1, 2, 8))):
                at = dice.randrange(len(damaged))
                if dice.random() < 0.3:
                    damaged[at : at + 8] = dice.choice((b"\xff" * 8, struct.pack("<Q", 1 << dice.randrange(63))))
                damaged[at] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            try:
                read_header(path)
                taken += 1
            except BadFile as error:
                faults.append(str(error))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert taken
    assert faults
    assert not any("\n" in fault for fault in faults)
