"""Finds the folder of what is made once and kept (kernels, products in C, the exported embedder) and the one of what
was made ahead. Code is loaded from both, so no other user may write to them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

NAME = "WHIPPET_CACHE_DIR"  # in the environment, by which the processes that we start find it
PREBUILT = "WHIPPET_PREBUILT_DIR"  # likewise
_ROOMS = ("kernels", "embedders")
_WRITABLE_BY_OTHERS = 0o022
_ONCE = "what has to be compiled or exported is made again at each start of the server"
_log = logging.getLogger(__name__)


class UnsafeFolder(Exception):
    """Others can write to the configured folder."""


@dataclass(frozen=True, slots=True)
class CacheDir:
    """Without a `path`, nothing is kept between starts."""

    path: Path | None
    wrong: str = ""  # why it is not the one that was asked for, or cannot be written


@contextlib.contextmanager
def cache_dir(given: Path | None, environ: MutableMapping[str, str]) -> Iterator[Path | None]:
    """Names the folder in `environ` while the server runs, and logs what is wrong with it. Raises UnsafeFolder."""
    found = look(given, environ, make=True)
    if found.wrong:
        _log.warning("cache-dir: %s", found.wrong)
    path, before, passing = found.path, environ.get(NAME), None
    if path is None:
        with contextlib.suppress(OSError):
            path = passing = Path(tempfile.mkdtemp(prefix="whippet-cache-"))  # of mode 0700
    if path is not None:
        environ[NAME] = str(path)
    try:
        yield path
    finally:
        environ.pop(NAME, None)
        if before is not None:
            environ[NAME] = before
        if passing is not None:
            shutil.rmtree(passing, ignore_errors=True)


@contextlib.contextmanager
def prebuilt_dir(given: Path | None, environ: MutableMapping[str, str]) -> Iterator[None]:
    """As `cache_dir`, for what was made ahead."""
    path, before = look_ahead(given), environ.pop(PREBUILT, None)
    if path is not None:
        environ[PREBUILT] = str(path)
    elif given is not None:
        _log.warning("prebuilt-dir: %s is no folder", given)
    try:
        yield
    finally:
        environ.pop(PREBUILT, None)
        if before is not None:
            environ[PREBUILT] = before


def look_ahead(given: Path | None) -> Path | None:
    path = None if given is None else Path(os.path.abspath(given))
    if path is not None and (unsafe := _unsafe_folder(path)):
        raise UnsafeFolder(f"prebuilt-dir: {unsafe}: code is loaded from there")
    return path if path is not None and path.is_dir() else None


def look(given: Path | None, environ: MutableMapping[str, str], *, make: bool = False) -> CacheDir:
    path = given or _default(environ)
    if path is None:
        return CacheDir(None, f"neither XDG_CACHE_HOME nor HOME is set; {_ONCE}")
    path = Path(os.path.abspath(path))
    unsafe = _unsafe_folder(path)
    if unsafe and given is not None:
        raise UnsafeFolder(
            f"cache-dir: {unsafe}: code is loaded from there; name a folder that only this user can write"
        )
    if unsafe:
        return CacheDir(None, f"{unsafe}, and code is loaded from there; {_ONCE}")
    if _can_write(path, make):
        return CacheDir(path)
    if any((path / room).is_dir() for room in _ROOMS):
        return CacheDir(path, f"{path} cannot be written: what is not in it is made again by every process")
    return CacheDir(None, f"{path} cannot be written; {_ONCE}")


def _default(environ: MutableMapping[str, str]) -> Path | None:
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "whippet"
    home = environ.get("HOME")
    return Path(home) / ".cache" / "whippet" if home else None


def _unsafe_folder(path: Path) -> str:
    return next(filter(None, map(_unsafe, (path, *(path / room for room in _ROOMS)))), "")


def _unsafe(folder: Path) -> str:
    """Names another user that could put code there; empty where none can, or where it does not exist yet."""
    try:
        found = folder.stat()
    except OSError:
        return ""
    if found.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user ({found.st_uid})"
    return f"{folder} can be written by others" if found.st_mode & _WRITABLE_BY_OTHERS else ""


def _can_write(path: Path, make: bool) -> bool:
    """Tries to write, since a read-only mount has no mode to ask for."""
    if not make:
        there = next(one for one in (path, *path.parents) if one.exists())
        return os.access(there, os.W_OK | os.X_OK) and there.is_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for room in _ROOMS:
            (path / room).mkdir(mode=0o700, exist_ok=True)
            tempfile.TemporaryFile(dir=path / room).close()
    except OSError:
        return False
    return True
