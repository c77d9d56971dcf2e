"""How many examples a property test draws, by the environment variable HYPOTHESIS_PROFILE.

quick     a fifth of them, the same in every run. `make check` and `make test`.
full      all of them, the same in every run. `make proofs` runs the property tests of every tier so.
explore   all of them, others in every run. For people who look for a bug.
"""

from __future__ import annotations

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
_DEFAULT = 100  # hypothesis's own


def example_count(full: int) -> int:
    """`full`, or a fifth of it in quick runs, but not fewer than ten."""
    return max(min(10, full), full // 5) if PROFILE == "quick" else full


def load_profile() -> None:
    settings.register_profile(
        PROFILE, derandomize=PROFILE != "explore", deadline=None, max_examples=example_count(_DEFAULT)
    )
    settings.load_profile(PROFILE)
