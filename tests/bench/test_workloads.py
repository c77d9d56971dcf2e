"""What the names of workloads mean."""

from __future__ import annotations

import pytest

from bench.workloads import workload


def test_workloads_have_the_tokens_that_their_names_say() -> None:
    assert workload("n3", 7, 5) == [(7, 5)] * 3
    assert workload("first4096", 7, 5) == [(4096, 2)]
    assert workload("short1024", 7, 5) == [(128, 128)] * 1024
    mixed = workload("mixed256", 7, 5)
    assert len(mixed) == 256
    assert all(100 <= tokens <= 1024 for one in mixed for tokens in one)
    assert mixed == workload("mixed256", 1, 1)
    with pytest.raises(ValueError, match="no workload"):
        workload("many", 1, 1)
