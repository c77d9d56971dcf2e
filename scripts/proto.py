"""Generates service/pb from protos/. With --check, only says whether what is committed is fresh.

protoc writes absolute imports of the proto package (`from whippet.v1 import …`). They are rewritten to where the code
lives, so that no top-level `whippet` package is needed and the names that reflection serves stay those of the protos.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "service" / "pb"
IMPORT = re.compile(r"^(from|import) whippet\.", re.MULTILINE)


def generate(out: Path) -> None:
    """Writes the package tree of the stubs under `out`."""
    sources = sorted(str(p.relative_to(ROOT / "protos")) for p in (ROOT / "protos").rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'protos'}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *sources,
        ]
    )
    if code != 0:
        sys.exit(code)
    for path in [*out.rglob("*.py"), *out.rglob("*.pyi")]:
        path.write_text(IMPORT.sub(r"\1 service.pb.whippet.", path.read_text()))
    for folder in (out, out / "whippet", out / "whippet" / "v1"):
        (folder / "__init__.py").touch()


def stale(fresh: Path) -> list[str]:
    """Paths that differ between `fresh` and the committed tree."""
    roots = (fresh, TARGET)
    names = {p.relative_to(root) for root in roots for p in root.rglob("*") if p.suffix in (".py", ".pyi")}
    return sorted(
        str(n)
        for n in names
        if not ((fresh / n).exists() and (TARGET / n).exists() and filecmp.cmp(fresh / n, TARGET / n, shallow=False))
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code is not what protos/ gives")
    if parser.parse_args().check:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            if changed := stale(Path(folder)):
                sys.exit(f"generated code is stale, run `make proto`: {', '.join(changed)}")
        return
    TARGET.mkdir(parents=True, exist_ok=True)
    generate(TARGET)


if __name__ == "__main__":
    main()
