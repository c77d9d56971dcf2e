"""Writes what is installed in this environment as a software bill of materials, CycloneDX 1.6.

python -m scripts.sbom > sbom.json
"""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote

OURS = "whippet-serve"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def component(package: Distribution) -> dict[str, Any]:
    """Describes a package and its licence, if it declares one."""
    metadata: Any = package.metadata  # an email.message.Message
    name, version = normal(metadata["Name"]), package.version
    url = f"pkg:pypi/{name}@{quote(version)}"
    found: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    expression = metadata.get("License-Expression")
    plain = (metadata.get("License") or "").strip()
    if expression:
        found["licenses"] = [{"expression": expression}]
    elif plain and "\n" not in plain:  # some put the whole text there
        found["licenses"] = [{"license": {"name": plain}}]
    return found


def bill(packages: list[Distribution]) -> dict[str, Any]:
    """Lists packages by name, each once; ours contains the others."""
    parts = {one["bom-ref"]: one for one in map(component, packages)}
    ours = [one for one in parts.values() if one["name"] == OURS]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**(ours or [{"name": OURS}])[0], "type": "application"}},
        "components": sorted(
            (one for one in parts.values() if one["name"] != OURS), key=lambda one: (one["name"], one["version"])
        ),
    }


if __name__ == "__main__":
    print(json.dumps(bill(list(distributions())), indent=2))
