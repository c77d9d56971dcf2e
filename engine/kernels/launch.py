"""A prepared launch: kernel, shape and arguments, ready to be enqueued or captured any number of times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import torch

from engine.kernels.build import Kernel, Kernels


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of `rows` by `columns`, in which the copy engine reads a matrix; an operand's are permuted as `wgmma` reads
    them."""

    matrix: torch.Tensor
    rows: int
    columns: int = 64  # of an operand of bfloat16
    operand: bool = True

    def map(self) -> Any:
        """The driver's tensor map; None where the matrix does not lie on a GPU."""
        if not self.matrix.is_cuda:
            return None
        from cuda.core import TensorMapDescriptorOptions as Options
        from cuda.core.utils import StridedMemoryView

        # The enumerations have no public name of their own; the defaults are of their types.
        kinds, promotion = type(Options.swizzle), type(Options.l2_promotion).L2_256B
        swizzle = kinds.SWIZZLE_128B if self.operand else kinds.NONE
        words = self.matrix.view(_WORDS.get(self.matrix.dtype, self.matrix.dtype))
        view = StridedMemoryView.from_any_interface(words, stream_ptr=-1)
        return view.as_tensor_map((self.rows, self.columns), swizzle=swizzle, l2_promotion=promotion)


_WORDS = {torch.bfloat16: torch.uint16, torch.int8: torch.uint8}  # as the driver takes them
Argument = torch.Tensor | Boxes | int | float | None


class Trigger(IntEnum):
    """When the next kernel of the chain may start."""

    AT_ENTRY = 0
    AFTER_WAIT = 1
    AT_END = 2


@dataclass(frozen=True, slots=True)
class Shape:
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """Holds the tensors that its arguments point into."""

    kernel: Kernel
    shape: Shape
    values: Mapping[str, Any]  # numbers and maps
    holds: tuple[torch.Tensor, ...]
    dependent: bool = True  # may start before its predecessor has ended
    arguments: tuple[Any, ...] = field(init=False, repr=False, compare=False)  # values as the driver takes them

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", self.kernel.arguments(self.values))

    def alone(self) -> Launch:
        """Starts only when its predecessor has ended."""
        return replace(self, dependent=False)

    def with_trigger(self, trigger: Trigger) -> Launch:
        return replace(self, values={**self.values, "trigger": int(trigger)})


def prepare(kernel: Kernel, shape: Shape, values: Mapping[str, Argument]) -> Launch:
    """Binds tensors and numbers by name. Raises BuildError for other names than the kernel's."""
    plain = {name: _plain(value) for name, value in values.items()}
    held = (value.matrix if isinstance(value, Boxes) else value for value in values.values())
    return Launch(kernel, shape, plain, tuple(one for one in held if isinstance(one, torch.Tensor)))


def _plain(value: Argument) -> Any:
    if value is None:
        return 0
    if isinstance(value, Boxes):
        return value.map()
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Enqueues(Protocol):
    def enqueue(self, launches: Iterable[Launch]) -> None:
        """Each launch sees what those before it wrote."""


class Launches(Protocol):
    """Makes launches of its library's kernels and enqueues them in order."""

    library: Kernels
    launcher: Enqueues

    def go(self, launch: Launch) -> None: ...


class Unlaunched:
    """For tensors without memory: steps are prepared and never run."""

    def enqueue(self, launches: Iterable[Launch]) -> None:
        pass


def launcher_of(device: torch.device) -> Enqueues:
    return Unlaunched() if device.type == "meta" else Launcher()


class Launcher:
    """Uses torch's current stream, whether it is capturing or not."""

    def __init__(self) -> None:
        from cuda.core import Device, LaunchConfig, launch

        self._device: Any = Device()
        self._device.set_current()
        self._config: Any = LaunchConfig
        self._launch: Any = launch

    def enqueue(self, launches: Iterable[Launch]) -> None:
        stream = self._device.create_stream(_TorchStream(torch.cuda.current_stream()))
        for one in launches:
            shape = one.shape
            config = self._config(
                grid=shape.grid,
                block=shape.threads,
                shmem_size=shape.shared,
                programmatic_stream_serialization=one.dependent,
            )
            self._launch(stream, config, one.kernel.handle, *one.arguments)


@dataclass(frozen=True, slots=True)
class _TorchStream:
    stream: torch.cuda.Stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream.cuda_stream)
