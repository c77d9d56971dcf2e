"""Two tenants, by their tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path

TENANTS = ("acme", "bravo")


def write_tokens(folder: Path) -> Path:
    path = folder / "tokens.yaml"
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in TENANTS}
    path.write_text(
        "".join(
            f'- {{tenant: {name}, sha256: "{hash_}", rights: [generate, admin]}}\n' for name, hash_ in hashes.items()
        )
    )
    return path


def metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {tenant}"),)
