"""The files of a model folder that are not weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

_TEMPLATES: Final = "additional_chat_templates"


def copy_companions(source: Path, out: Path, without: tuple[str, ...] = ()) -> None:
    """Tokenizer, templates, generation defaults, licence and config, except those named."""
    for file in sorted(source.iterdir()):
        if _travels(file) and file.name not in without:
            shutil.copyfile(file, out / file.name)
    if (source / _TEMPLATES).is_dir():
        (out / _TEMPLATES).mkdir(exist_ok=True)
        for file in sorted((source / _TEMPLATES).glob("*.jinja")):
            shutil.copyfile(file, out / _TEMPLATES / file.name)


def _travels(file: Path) -> bool:
    name = file.name
    if not file.is_file() or name.endswith(".index.json"):
        return False
    return file.suffix in (".json", ".jinja", ".model", ".txt") or name.upper().startswith(("LICENSE", "NOTICE"))
