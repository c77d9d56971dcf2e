"""Computes torch's operations on tensors of a GPU by the CPU: the tensors stay where they are, and kernels launched by
other ways see them, but torch itself launches none and only copies bytes.

For tools that rewrite every kernel before it runs: torch's own take them minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Copy = Callable[[int, int, int], None]  # to an address, from an address, bytes
_NO_KERNEL = ("empty", "new_empty", "empty_strided", "empty_like", "new_empty_strided", "record_stream", "is_pinned")


class OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: str, fetch: Copy, send: Copy) -> None:
        """`device`: the type of device whose operations are computed here."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._fetch, self._send = device, fetch, send

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_free(func):
            return func(*args, **kwargs)
        call = _HostOperation(self._device, self._fetch)
        here_args, here_kwargs = tree_map(call.here, list(args)), tree_map(call.here, kwargs)
        if not call.concerned:
            return func(*args, **kwargs)
        made = func(*here_args, **here_kwargs)
        if func._schema.is_mutable:
            for address, held in call.storages.items():
                self._send(address, held.data_ptr(), held.nbytes())
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or self._device).type == "cpu":
            return made
        return tree_map(lambda one: self._there(one, call), made)

    def _there(self, made: Any, call: _HostOperation) -> Any:
        """Converts a result: one of the caller's own tensors, or a new one on the device."""
        if not isinstance(made, torch.Tensor) or id(made) in call.given:
            return made
        own = call.theirs.get(id(made))
        if own is not None:
            return own
        made = made.contiguous().clone() if made.storage_offset() else made.contiguous()
        found = torch.empty(made.shape, dtype=made.dtype, device=self._device)
        self._send(found.data_ptr(), made.data_ptr(), made.nbytes)
        return found


class _HostOperation:
    """One operation: which of its tensors are the device's, and their bytes here."""

    def __init__(self, device: str, fetch: Copy) -> None:
        self._device, self._fetch = device, fetch
        self.concerned = False
        self.storages: dict[int, torch.UntypedStorage] = {}  # by the address there
        self.theirs: dict[int, torch.Tensor] = {}  # the caller's, by the id of ours
        self.given: set[int] = set()  # ids of the caller's that lie here
        self._held: list[torch.Tensor] = []  # so that no id comes twice

    def here(self, one: Any) -> Any:
        if isinstance(one, torch.Generator) and one.device.type == self._device:
            return None
        if isinstance(one, torch.device) and one.type == self._device:
            self.concerned = True
            return torch.device("cpu")
        if not isinstance(one, torch.Tensor):
            return one
        if one.device.type != self._device:
            self.given.add(id(one))
            return one
        self.concerned = True
        storage = one.untyped_storage()
        held = self.storages.get(storage.data_ptr())
        if held is None:
            held = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            if storage.nbytes():
                self._fetch(held.data_ptr(), storage.data_ptr(), storage.nbytes())
                self.storages[storage.data_ptr()] = held
        made = torch.empty(0, dtype=one.dtype).set_(held, one.storage_offset(), one.size(), one.stride())
        self._held.append(made)
        self.theirs[id(made)] = one
        return made


def _is_free(func: Any) -> bool:
    """Whether it launches nothing: memory that is not written, and views."""
    returns = func._schema.returns
    views = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return views or func._schema.name.removeprefix("aten::") in _NO_KERNEL


def on_gpu() -> OnHost:
    from cuda.bindings import driver

    def fetch(to: int, source: int, size: int) -> None:
        _check(driver.cuMemcpyDtoH(to, source, size))

    def send(to: int, source: int, size: int) -> None:
        if size:
            _check(driver.cuMemcpyHtoD(to, source, size))

    return OnHost("cuda", fetch, send)


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"a copy failed: {result[0]}")
