"""Files that several processes may make at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def keep(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replaces a file whole or not at all. `mode` limits its readers, as the folder may. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, mode)
    os.replace(file.name, path)
