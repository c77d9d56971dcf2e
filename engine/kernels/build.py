"""Compiles the CUDA sources of this folder at run time and keeps the machine code in the user's cache folder.

Shapes are compiled in. A cubin's name hashes all that it was made from: source and headers, definitions, architecture,
compiler version. A file ends with the SHA-256 of its code, so that a damaged one is compiled anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol

from engine.cores import usable_cores
from engine.kernels import targets
from engine.kernels.gpu import GpuShape, gpu_shape
from engine.kernels.keeping import keep

if TYPE_CHECKING:
    import torch

SOURCES = Path(__file__).parent
MINIMUM_CAPABILITY = (8, 0)
OVERLAP_CAPABILITY = (9, 0)  # from here on launches of a chain may overlap
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_VALUES = ("int", "u32", "float", "Map")
MOST_THREADS = 16  # that compile: each takes some 200 MB for as long as it does
SLOW = ("batch_sampling", "sampling", "prefill_attention_wide", "rows")  # a second and more: what begins last ends last
Definitions = tuple[tuple[str, int], ...]
Source = tuple[str, Definitions]  # a file's stem and its definitions
_FORM = "code, SHA-256"  # of a file
_PACKAGE = "whippet_kernels"  # of the wheel that has kernels compiled ahead
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """Reports a kernel that cannot be built: names the source, and gives the compiler's message."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: str  # "int", "u32", "float", "Map", or "pointer"

    def encode(self, value: Any) -> Any:
        if self.type == "Map":
            return value
        if self.type == "float":
            return ctypes.c_float(value)
        whole = int(value)
        return ctypes.c_int(whole) if self.type == "int" else ctypes.c_uint32(whole) if self.type == "u32" else whole


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    handle: Any  # cuda.core's

    def arguments(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Orders values as the source declares its parameters. Raises BuildError where the names differ."""
        names = {parameter.name for parameter in self.parameters}
        if names != set(values):
            raise BuildError(f"kernel {self.name}: {sorted(names ^ set(values))} given or missing")
        return tuple(parameter.encode(values[parameter.name]) for parameter in self.parameters)


class CompileFunction(Protocol):
    def __call__(self, source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes: ...


def source_text(name: str) -> str:
    """Puts headers in place of their includes, so that a compiler needs no search path."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (SOURCES / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return expand(name)


def parameters_of(source: str, entry: str) -> tuple[Parameter, ...]:
    """Raises BuildError for an unknown entry."""
    found = re.search(r'extern "C" __global__ [^;{]*?\b' + entry + r"\(([^)]*)\)\s*\{", source)
    if found is None:
        raise BuildError(f"no kernel {entry} in its source")
    parameters = []
    for declared in found.group(1).split(","):
        words, name = declared.strip().rsplit(None, 1)
        kind = "pointer" if "*" in words or name.startswith("*") else words.removeprefix("const __grid_constant__ ")
        if kind != "pointer" and kind not in _VALUES:
            raise BuildError(f"kernel {entry}: parameter type {kind} is not known")
        parameters.append(Parameter(name.lstrip("*"), kind))
    return tuple(parameters)


def compile_with_nvrtc(source: str, name: str, defines: Mapping[str, int], arch: str) -> bytes:
    """NVRTC needs no GPU; makes PTX where `arch` is a virtual one. Raises BuildError."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=name,
        arch=arch,
        std="c++17",
        device_as_default_execution_space=True,  # or a generic lambda counts as the host's
        define_macro=[(key, str(value)) for key, value in defines.items()],
    )
    try:
        compiled = Program(source, "c++", options).compile("ptx" if is_virtual(arch) else "cubin")
    except Exception as failure:
        raise BuildError(f"{name} for {arch}: {failure}") from failure
    return bytes(compiled.code)


def compiler_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def default_cache() -> Path:
    if named := os.environ.get("WHIPPET_CACHE_DIR"):
        return Path(named) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "whippet" / "kernels"


def prebuilt_folder() -> Path | None:
    named = os.environ.get("WHIPPET_PREBUILT_DIR")
    return Path(named) / "kernels" if named else None


def packaged_folder() -> Path | None:
    found = find_spec(_PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "kernels"


@dataclass(frozen=True, slots=True)
class CubinCache:
    folder: Path
    compiler: str  # name and version
    compile: CompileFunction
    prebuilt: tuple[Path, ...] = ()  # looked at first, never written
    _missed: Event = field(default_factory=Event)  # a missing file was already reported

    def get(self, name: str, defines: Mapping[str, int], arch: str) -> bytes:
        """Compiles a source once, then reads it. Raises BuildError."""
        source = source_text(name)
        listed = "\n".join(f"{key}={value}" for key, value in sorted(defines.items()))
        digest = hashlib.sha256("\0".join((_FORM, self.compiler, arch, listed, source)).encode()).hexdigest()
        file = f"{Path(name).stem}-{digest[:32]}.cubin"
        for folder in (*self.prebuilt, self.folder):
            if (kept := _read(folder / file)) is not None:
                return kept
        if self.prebuilt and not self._missed.is_set():
            self._missed.set()
            folders = " or ".join(map(str, self.prebuilt))
            _log.warning("kernels are compiled here: %s for %s is not in %s", name, arch, folders)
        code = self.compile(source, name, defines, arch)
        with contextlib.suppress(OSError):  # a folder that cannot be written costs a compilation next time, no more
            keep(self.folder / file, code + hashlib.sha256(code).digest())
        return code


def _read(path: Path) -> bytes | None:
    """None for a missing, unreadable or damaged file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    code, digest = content[:-size], content[-size:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _log.warning("%s is damaged", path)
    return None


def is_virtual(arch: str) -> bool:
    return arch.startswith("compute_")


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name; only 9.0 has instructions that its successors lack."""
    major, minor = capability
    return f"sm_{major}{minor}a" if capability == (9, 0) else f"sm_{major}{minor}"


class Kernels(Protocol):
    @property
    def gpu(self) -> GpuShape: ...

    def kernel(self, name: str, entry: str, defines: Mapping[str, int], shared: int = 0) -> Kernel:
        """The kernel may be launched with `shared` bytes of dynamic shared memory. Raises BuildError."""


class WantedKernels:
    """Records requested kernels; those it returns have the real parameters and cannot run."""

    def __init__(self, gpu: GpuShape) -> None:
        self.gpu = gpu
        self.sources: set[Source] = set()
        self._given: dict[tuple[str, str, Definitions], Kernel] = {}
        self._parameters: dict[tuple[str, str], tuple[Parameter, ...]] = {}

    def kernel(self, name: str, entry: str, defines: Mapping[str, int], shared: int = 0) -> Kernel:
        most = self.gpu.shared
        if shared > most:
            raise BuildError(f"kernel {entry} needs {shared} bytes of shared memory, a block may have {most}")
        if (objection := targets.why_not(name, self.gpu)) is not None:
            raise BuildError(f"kernel {entry}: {objection}")
        definitions = tuple(sorted(defines.items()))
        found = self._given.get((name, entry, definitions))
        if found is None:
            self.sources.add((name, definitions))
            if (name, entry) not in self._parameters:
                self._parameters[name, entry] = parameters_of(source_text(f"{name}.cu"), entry)
            found = self._given[name, entry, definitions] = Kernel(entry, self._parameters[name, entry], None)
        return found


class KernelLibrary:
    """Loads kernels when they are first wanted, in one thread, while other threads compile more."""

    def __init__(self, arch: str, cache: CubinCache, gpu: GpuShape) -> None:
        self.arch = arch
        self.gpu = gpu
        self._cache = cache
        self._loaded: dict[tuple[str, str, Definitions], Kernel] = {}
        self._codes: dict[Source, Future[bytes]] = {}
        threads = min(MOST_THREADS, max(2, usable_cores()))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")  # threads begin with the first work

    def compile_ahead(self, wanted: Iterable[Source]) -> None:
        """Compiles new sources in parallel; `kernel` waits only for its own."""
        new = set(wanted) - self._codes.keys()
        for source in sorted(new, key=lambda one: (one[0] not in SLOW, one)):
            self._codes[source] = self._pool.submit(self._compile, source)

    def _compile(self, source: Source) -> bytes:
        name, defines = source
        return self._cache.get(f"{name}.cu", dict(defines), self.arch)

    def code(self, source: Source) -> bytes:
        """Waits for a source compiled ahead, else compiles it. Raises BuildError, which names it."""
        begun = self._codes.get(source)
        if begun is not None:
            return begun.result()
        _log.debug("kernels of %s are compiled when they are asked for", source[0])
        return self._compile(source)

    def close(self) -> None:
        """Later requests compile on demand."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._codes = {source: code for source, code in self._codes.items() if not code.cancelled()}

    def kernel(self, name: str, entry: str, defines: Mapping[str, int], shared: int = 0) -> Kernel:
        key = (name, entry, tuple(sorted(defines.items())))
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load(name, entry, defines, shared)
        return found

    def _load(self, name: str, entry: str, defines: Mapping[str, int], shared: int) -> Kernel:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        code = self.code((name, tuple(sorted(defines.items()))))
        load = ObjectCode.from_ptx if is_virtual(self.arch) else ObjectCode.from_cubin
        handle = load(code).get_kernel(entry)
        # Loads it now: a load at the first launch could fall into a stream capture, which forbids it.
        status, function = driver.cuKernelGetFunction(driver.CUkernel(int(handle.handle)))
        if int(status) == 0 and shared:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuFuncSetAttribute(function, limit, shared)
        if int(status) != 0:
            raise BuildError(f"kernel {entry} with {shared} bytes of shared memory does not load: {status}")
        return Kernel(entry, parameters_of(source_text(f"{name}.cu"), entry), handle)


def why_no_gpu(device: torch.device) -> str | None:
    """None too where a model is shapes alone."""
    if device.type == "meta":
        return None
    if device.type != "cuda":
        return "needs a CUDA device"
    import torch

    return _too_old(torch.cuda.get_device_capability(device))


def _too_old(capability: tuple[int, int]) -> str | None:
    if capability >= MINIMUM_CAPABILITY:
        return None
    return f"compute capability {capability[0]}.{capability[1]} is below 8.0"


def open_library(capability: tuple[int, int], cache: Path | None = None, arch: str | None = None) -> KernelLibrary:
    """Raises BuildError where nothing can compile."""
    objection = _too_old(capability)
    if objection is not None:
        raise BuildError(objection)
    ahead = () if cache else filter(None, (prebuilt_folder(), packaged_folder()))
    kept = kept_in(cache or default_cache(), *ahead)
    import torch

    return KernelLibrary(arch or architecture(capability), kept, gpu_shape(torch.device("cuda")))


def kept_in(folder: Path, *prebuilt: Path) -> CubinCache:
    """Raises BuildError where NVRTC is not installed."""
    try:
        # By one thread, before others compile: modules that two threads import at once are seen half made.
        import_module("cuda.core")
        version = compiler_version()
    except ImportError as failure:
        raise BuildError(f"cuda.core and NVRTC are needed: {failure}") from failure
    return CubinCache(folder, version, compile_with_nvrtc, prebuilt)


@dataclass(slots=True)
class GpuKernels:
    library: KernelLibrary | WantedKernels | None = None  # opened by who first wants it

    def open(self, device: torch.device) -> Kernels:
        """Raises BuildError where nothing can be compiled."""
        if self.library is None:
            import torch

            self.library = open_library(torch.cuda.get_device_capability(device))
        return self.library

    def close(self) -> None:
        """Stops compiling what was not asked for."""
        if isinstance(self.library, KernelLibrary):
            self.library.close()
