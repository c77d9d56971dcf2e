"""Generates from protos/ the stubs of the server and of the Python client, and the descriptors that reflection serves.
With --check, only reports whether the committed ones are fresh.

protoc writes absolute imports of the proto package (`from whippet.v1 import …`). They are rewritten to the code's own
package, so that no top-level `whippet` package is needed and the names that reflection serves stay those of the protos.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


@dataclass(frozen=True, slots=True)
class Target:
    package: str  # dotted
    folder: Path
    packages: tuple[str, ...]  # top-level folders of protos/
    descriptors: str = ""  # file for all descriptors, comments and JSON names included; empty: none


OTHERS = ("inference", "smg", "vllm")  # their protocols
TARGETS = (
    Target("service.pb", ROOT / "service" / "pb", ("whippet", *OTHERS), descriptors="descriptors.binpb"),
    Target("whippet_client.pb", ROOT / "clients" / "python" / "whippet_client" / "pb", ("whippet",)),
)


def generate(target: Target, out: Path) -> None:
    """Writes the package tree of the stubs under `out`."""
    sources = sorted(
        str(path.relative_to(PROTOS)) for one in target.packages for path in (PROTOS / one).rglob("*.proto")
    )
    flags = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if target.descriptors:
        flags += ["--include_source_info", f"--descriptor_set_out={out / target.descriptors}"]
    well_known = resources.files("grpc_tools") / "_proto"
    code = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources])
    if code != 0:
        sys.exit(code)
    imports = re.compile(rf"^(from|import) (?=(?:{'|'.join(target.packages)})[. ])", re.MULTILINE)
    for path in [*out.rglob("*.py"), *out.rglob("*.pyi")]:
        path.write_text(imports.sub(rf"\1 {target.package}.", path.read_text()))
    for folder in {out, *(parent for source in sources for parent in (out / source).parents if out in parent.parents)}:
        (folder / "__init__.py").touch()


def stale(target: Target, fresh: Path) -> list[str]:
    """Paths that differ between `fresh` and the committed tree."""
    roots = (fresh, target.folder)
    kinds = (".py", ".pyi", ".binpb")
    names = {path.relative_to(root) for root in roots for path in root.rglob("*") if path.suffix in kinds}
    return sorted(
        str((target.folder / name).relative_to(ROOT)) for name in names if not _same(fresh / name, target.folder / name)
    )


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code is not what protos/ gives")
    check = parser.parse_args().check
    changed = []
    for target in TARGETS:
        if check:
            with tempfile.TemporaryDirectory() as folder:
                generate(target, Path(folder))
                changed += stale(target, Path(folder))
        else:
            target.folder.mkdir(parents=True, exist_ok=True)
            generate(target, target.folder)
    if changed:
        sys.exit(f"generated code is stale, run `make proto`: {', '.join(changed)}")


if __name__ == "__main__":
    main()
