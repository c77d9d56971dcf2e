"""The tensors that the processes of a split model exchange.

Where all ranks are on one host, gloo listens on the loopback interface alone and meets in a file of a folder that only
the owner may enter. With ranks of other hosts it listens on the addresses by which these reach each other, and meets
through the first rank (`meeting.py`). Sums of GPUs go through each other's memory, or through NCCL.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from engine.kernels.build import Kernels
from engine.kernels.exchange import Channels, exchange_sum, sums_by_kernel
from engine.kernels.launch import launcher_of
from engine.model.split import Part

LOOPBACK: Final = "127.0.0.1"
_NCCL: Final = {"NCCL_NVLS_ENABLE": "0"}  # no NVLink multicast
_ON_ONE_HOST: Final = {"NCCL_SOCKET_IFNAME": "lo"}  # no open port


class Gloo:
    """A `RankExchange` between the memories of hosts."""

    def __init__(self, part: Part, store: Any, timeout: float, address: str) -> None:
        """Waits for the other ranks. `store`: where they find each other; `timeout`: seconds that any rank may lag;
        `address`: by which they reach this one."""
        self._part = part
        self.store = store
        torch_distributed: Any = distributed  # whose types name little of it
        kind = torch_distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = kind(self.store, part.rank, part.ranks, options)
        self.sum(torch.zeros(1))  # a rank that is connected to this one may still read addresses of others

    @property
    def part(self) -> Part:
        return self._part

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up in rings: a number's sum is made in one rank and copied to the others."""
        self._group.allreduce([x]).wait()
        return x

    def share(self, x: torch.Tensor) -> torch.Tensor:
        self._group.broadcast([x], distributed.BroadcastOptions()).wait()  # from rank 0
        return x

    def collect(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        options = distributed.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(x) for _ in range(self._part.ranks)] if self._part.first else []
        self._group.gather([found] if found else [], [x], options).wait()
        return found or None


class _OnGpus:
    """What lies on a GPU is added up there; all else goes through the hosts."""

    def __init__(self, hosts: Gloo) -> None:
        self._hosts = hosts

    @property
    def part(self) -> Part:
        return self._hosts.part

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._hosts.share(x.cpu()))

    def collect(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Leaves the tensors in the host's memory."""
        return self._hosts.collect(x.cpu())


class PeerSums(_OnGpus):
    """A `RankExchange` of GPUs that write each other's memory."""

    def __init__(self, hosts: Gloo, channels: Channels, library: Kernels) -> None:
        super().__init__(hosts)
        self._channels = channels
        self._library = library
        self._launcher = launcher_of(torch.device("cuda"))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if sums_by_kernel(x, self._channels):
            self._launcher.enqueue([exchange_sum(self._library, x, self._channels)])
            return x
        return x.copy_(self._hosts.sum(x.cpu()))


class Nccl(_OnGpus):
    """A `RankExchange` of GPUs that do not write each other's memory."""

    def __init__(self, hosts: Gloo, timeout: float, *, one_host: bool = True) -> None:
        super().__init__(hosts)
        for name, value in (_NCCL | (_ON_ONE_HOST if one_host else {})).items():
            os.environ.setdefault(name, value)
        torch_distributed: Any = distributed
        kind = torch_distributed.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=timeout)
        store = torch_distributed.PrefixStore("gpus", hosts.store)
        self._gpus: Any = kind(store, self.part.rank, self.part.ranks, options)
        self.sum(torch.zeros(1, device="cuda"))  # connects

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return self._hosts.sum(x)
        self._gpus.allreduce([x]).wait()
        return x

    def close(self) -> None:
        """Is called while the other ranks are there: NCCL may wait for one that has gone."""
        self._gpus.abort()
