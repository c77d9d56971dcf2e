"""Reading, compiling and keeping the sources."""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.build import (
    BuildError,
    CubinCache,
    Kernel,
    KernelLibrary,
    Source,
    WantedKernels,
    parameters_of,
    source_text,
)
from engine.kernels.gpu import GpuShape

ENTRIES = {
    "exchange_sum.cu": ["exchange_sum"],
    "gated_product.cu": ["gated_product"],
    "linear.cu": ["linear"],
    "linear_residual.cu": ["linear_residual"],
    "gate_up.cu": ["gate_up"],
    "attention.cu": ["attention"],
    "head.cu": ["head"],
    "advance.cu": ["start", "take", "advance"],
    "accept.cu": ["accept"],
    "propose.cu": ["lookup", "replay", "drafted"],
    "draft.cu": ["follow", "guess"],
    "gemm.cu": ["gemm"],
    "gemm_wide.cu": ["gemm"],
    "portable.cu": ["join", "heads", "gate", "attend"],
    "plain_product.cu": ["plain_product"],
    "prefill_attention.cu": ["prefill_attention"],
    "prefill_ends.cu": ["keep_ends"],
    "prefill_gate.cu": ["gate"],
    "prefill_heads.cu": ["row_heads"],
    "prefill_stream.cu": ["embed", "add_norm"],
    "two_pass_head.cu": ["two_pass_head"],
    "two_pass_top.cu": ["two_pass_top"],
    "batch_attention.cu": ["plan", "attend"],
    "rows.cu": ["change", "pick", "finish"],
    "batch_sampling.cu": ["sample"],
    "prefill_attention_wide.cu": ["prefill_attention"],
    "sampling.cu": ["adjust", "bins", "sift", "draw"],
}

GPU = GpuShape(132, 227 << 10, warpgroups=True, overlap=True)


class CountingCompiler:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        self.calls += 1
        return f"{name} {arch} {sorted(defines.items())} {len(source)}".encode()


def test_what_was_compiled_ahead_is_read_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def compile_source(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        return f"{name} {defines['A']}".encode()

    ahead, kept = tmp_path / "ahead", tmp_path / "kept"
    CubinCache(ahead, "compiler", compile_source).get("linear.cu", {"A": 1}, "sm_90a")
    (one,) = ahead.iterdir()
    one.write_bytes(b"made ahead" + hashlib.sha256(b"made ahead").digest())
    cache = CubinCache(kept, "compiler", compile_source, (tmp_path / "nowhere", ahead))
    assert cache.get("linear.cu", {"A": 1}, "sm_90a") == b"made ahead"
    assert one.stat().st_mode & 0o777 == 0o644
    assert not kept.exists()
    assert not caplog.messages
    for number in (2, 3):
        assert cache.get("linear.cu", {"A": number}, "sm_90a") == f"linear.cu {number}".encode()
    assert len(list(kept.iterdir())) == 2
    assert list(ahead.iterdir()) == [one]
    (line,) = caplog.messages
    assert f"linear.cu for sm_90a is not in {tmp_path / 'nowhere'} or {ahead}" in line


def test_every_source_is_known_here() -> None:
    assert {path.name for path in build.SOURCES.glob("*.cu")} == set(ENTRIES)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_sources_stand_alone(name: str) -> None:
    text = source_text(name)
    assert '#include "' not in text
    assert text.count("using u64 =") == 1
    for entry in ENTRIES[name]:
        names = [parameter.name for parameter in parameters_of(text, entry)]
        assert len(set(names)) == len(names) >= 3


def test_parameters_as_declared() -> None:
    source = (
        'extern "C" __global__ void __launch_bounds__(32)\n    f(const u16* x, float eps,\n      int n, u32 m, '
        "const __grid_constant__ Map w) {\n}"
    )
    found = [(parameter.name, parameter.type) for parameter in parameters_of(source, "f")]
    assert found == [("x", "pointer"), ("eps", "float"), ("n", "int"), ("m", "u32"), ("w", "Map")]
    with pytest.raises(BuildError, match="no kernel g"):
        parameters_of(source, "g")
    with pytest.raises(BuildError, match="double"):
        parameters_of(source.replace("float", "double"), "f")


def test_arguments_go_by_name() -> None:
    source = 'extern "C" __global__ void f(const u16* x, float eps, int n) {'
    kernel = Kernel("f", parameters_of(source, "f"), None)
    pointer, eps, n = kernel.arguments({"n": -3, "x": 1 << 40, "eps": 0.5})
    assert (pointer, eps.value, n.value) == (1 << 40, 0.5, -3)
    for wrong in ({"n": 1, "x": 0}, {"n": 1, "x": 0, "eps": 0.0, "more": 1}):
        with pytest.raises(BuildError, match="given or missing"):
            kernel.arguments(wrong)


def test_cache_compiles_once_and_anew_for_anything_else(tmp_path: Path) -> None:
    compiler = CountingCompiler()
    cache = CubinCache(tmp_path / "deep" / "down", "compiler 1", compiler)
    first = cache.get("linear.cu", {"A": 1, "B": 2}, "sm_90a")
    assert cache.get("linear.cu", {"B": 2, "A": 1}, "sm_90a") == first
    assert compiler.calls == 1
    cache.get("linear.cu", {"A": 1, "B": 3}, "sm_90a")
    cache.get("linear.cu", {"A": 1, "B": 2}, "sm_80")
    cache.get("head.cu", {"A": 1, "B": 2}, "sm_90a")
    CubinCache(cache.folder, "compiler 2", compiler).get("linear.cu", {"A": 1, "B": 2}, "sm_90a")
    assert compiler.calls == 5
    assert len(list(cache.folder.iterdir())) == 5  # and no half-written files


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 100])
def test_what_is_damaged_is_compiled_anew(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Kept or made ahead: a driver that is given half a kernel refuses it, at each start."""
    compiler = CountingCompiler()
    ahead = CubinCache(tmp_path / "ahead", "compiler", compiler)
    cache = CubinCache(tmp_path / "kept", "compiler", compiler, (ahead.folder,))
    code = ahead.get("head.cu", {}, "sm_80")
    assert cache.get("head.cu", {}, "sm_80") == code
    for folder, calls in ((ahead.folder, 2), (cache.folder, 3)):
        (one,) = folder.iterdir()
        one.write_bytes(damage)
        for _ in range(2):
            assert cache.get("head.cu", {}, "sm_80") == code
        assert compiler.calls == calls
        assert f"{one} is damaged" in caplog.messages
    assert len([*cache.folder.iterdir()]) == 1


def test_a_wheel_of_kernels_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else of that name: a folder without code is no package of ours."""
    folder = tmp_path / "whippet_kernels"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert build.packaged_folder() is None
    (folder / "__init__.py").touch()
    importlib.invalidate_caches()
    assert build.packaged_folder() == folder / "kernels"


def test_cache_without_a_folder_still_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    compiler = CountingCompiler()
    cache = CubinCache(tmp_path / "file" / "cache", "compiler", compiler)
    assert cache.get("head.cu", {}, "sm_80") == cache.get("head.cu", {}, "sm_80")
    assert compiler.calls == 2


def test_a_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    def fail(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        raise BuildError("no")

    with pytest.raises(BuildError):
        CubinCache(tmp_path, "compiler", fail).get("head.cu", {}, "sm_80")
    assert not list(tmp_path.iterdir())


def test_what_is_wanted_is_compiled_side_by_side_and_once(tmp_path: Path) -> None:
    together = threading.Barrier(2)  # breaks where a compilation waits for another
    compiler = CountingCompiler()

    def compile_source(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        together.wait(60)
        return compiler(source, name, defines, arch)

    (tmp_path / "file").write_text("in the way")  # nothing can be kept in the folder
    library = KernelLibrary("sm_90a", CubinCache(tmp_path / "file" / "cache", "compiler", compile_source), GPU)
    wanted = WantedKernels(GPU)
    kernel = wanted.kernel("advance", "start", {"OP_COLUMNS": 64})
    assert [one.name for one in kernel.parameters][:2] == ["token", "position"]
    wanted.kernel("advance", "advance", {"OP_COLUMNS": 64})
    wanted.kernel("advance", "advance", {"OP_COLUMNS": 128})
    library.compile_ahead(wanted.sources)
    library.compile_ahead(wanted.sources)
    for source in wanted.sources:
        library.code(source)
    assert compiler.calls == 2


def test_one_that_does_not_compile_is_told(tmp_path: Path) -> None:
    def fail(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        raise BuildError("no")

    wanted = WantedKernels(GPU)
    wanted.kernel("advance", "start", {"OP_COLUMNS": 64})
    library = KernelLibrary("sm_90a", CubinCache(tmp_path, "compiler", fail), GPU)
    library.compile_ahead(wanted.sources)
    with pytest.raises(BuildError, match="no"):
        library.kernel("advance", "start", {"OP_COLUMNS": 64})


def test_who_is_no_longer_waited_for_is_compiled_when_it_is_asked_for(tmp_path: Path) -> None:
    compiler, goes_on = CountingCompiler(), threading.Event()

    def compile_source(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        if threading.current_thread().name.startswith("compile"):
            assert goes_on.wait(60)
        return compiler(source, name, defines, arch)

    library = KernelLibrary("sm_90a", CubinCache(tmp_path, "compiler", compile_source), GPU)
    sources: list[Source] = [("advance", (("OP_COLUMNS", 64 * at),)) for at in range(1, 12)]
    library.compile_ahead(sources)
    library.close()
    try:
        library.code(sources[-1])  # was still to begin: a pool has eight threads at most
        assert compiler.calls == 1
    finally:
        goes_on.set()


@pytest.mark.product
def test_side_by_side_or_one_by_one_gives_the_same_code_and_names_what_fails(tmp_path: Path) -> None:
    good: list[Source] = [("accept", (("OP_GROUP", group), ("OP_LAID", 8))) for group in (1, 2, 4, 8)]
    bad: Source = ("accept", (("OP_LAID", 8),))
    library = KernelLibrary("sm_90a", build.kept_in(tmp_path), GPU)
    library.compile_ahead([*good, bad])
    for name, defines in good:
        alone = build.compile_with_nvrtc(source_text(f"{name}.cu"), f"{name}.cu", dict(defines), "sm_90a")
        assert library.code((name, defines)) == alone
    with pytest.raises(BuildError, match=r"accept\.cu for sm_90a: (.|\n)*OP_GROUP"):
        library.code(bad)


def test_cards_that_are_too_old() -> None:
    with pytest.raises(BuildError, match=r"7\.5 is below 8\.0"):
        build.open_library((7, 5))


def test_architectures() -> None:
    assert [build.architecture(capability) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_120",
    ]
