"""Where compiled code is kept, what of it is refused, and what is done where it cannot be written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from cache.semantic.export import cache_folder
from engine.kernels.build import default_cache
from service.core.operations.cache_dir import NAME, PREBUILT, CacheDir, UnsafeFolder, cache_dir, look, prebuilt_dir


def test_the_one_that_is_set_is_made_and_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "/before")
    folder = tmp_path / "a" / "b"
    with cache_dir(folder, os.environ) as found:
        assert found == folder
        assert [one.stat().st_mode & 0o777 for one in (folder, folder / "kernels", folder / "embedders")] == [0o700] * 3
        assert (default_cache(), cache_folder()) == (folder / "kernels", folder / "embedders")
    assert os.environ[NAME] == "/before"


def test_what_was_made_ahead_is_passed_on_unless_others_can_write_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {PREBUILT: "/before"}
    with prebuilt_dir(tmp_path, environ):
        assert environ == {PREBUILT: str(tmp_path)}
    assert environ == {PREBUILT: "/before"}
    with prebuilt_dir(tmp_path / "none", environ):
        assert environ == {}
    assert "is no folder" in caplog.text
    (tmp_path / "kernels").mkdir(mode=0o775)
    (tmp_path / "kernels").chmod(0o775)
    with pytest.raises(UnsafeFolder, match=r"prebuilt-dir: .*kernels can be written by others"):
        prebuilt_dir(tmp_path, environ).__enter__()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "{}/x", "HOME": "{}/h"}, "x/whippet"),
        ({"HOME": "{}/h"}, "h/.cache/whippet"),
        ({"XDG_CACHE_HOME": "", "HOME": "{}/h"}, "h/.cache/whippet"),
    ],
)
def test_the_default(tmp_path: Path, environ: dict[str, str], expected: str) -> None:
    given = {name: value.format(tmp_path) for name, value in environ.items()}
    assert look(None, given, make=True) == CacheDir(tmp_path / expected)


def test_without_a_home_there_is_one_for_this_life(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    with caplog.at_level(logging.WARNING), cache_dir(None, environ) as found:
        assert found is not None
        assert found.stat().st_mode & 0o777 == 0o700
        assert environ == {NAME: str(found)}
    assert not found.exists()
    assert environ == {}
    (line,) = [record.message for record in caplog.records]
    assert "neither XDG_CACHE_HOME nor HOME is set" in line


@pytest.mark.parametrize("room", ["", "kernels", "embedders"])
def test_what_others_can_write_is_refused(tmp_path: Path, room: str) -> None:
    folder = tmp_path / "kept"
    with cache_dir(folder, {}):
        pass
    (folder / room).chmod(0o775)
    with pytest.raises(UnsafeFolder, match="can be written by others"), cache_dir(folder, {}):
        pass
    found = look(None, {"XDG_CACHE_HOME": str(tmp_path)})
    assert found == CacheDir(tmp_path / "whippet"), "the default is another folder"
    folder.rename(tmp_path / "whippet")
    found = look(None, {"XDG_CACHE_HOME": str(tmp_path)})
    assert found.path is None
    assert "can be written by others" in found.wrong


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeFolder, match="belongs to another user"):
        look(tmp_path, {})


def test_one_that_cannot_be_written_is_replaced_or_only_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # root may write everywhere but below a file
    found = look(tmp_path / "file" / "kept", {}, make=True)
    assert found.path is None
    assert "cannot be written" in found.wrong
    baked = tmp_path / "baked"
    (baked / "kernels").mkdir(parents=True, mode=0o755)
    (baked / "embedders").write_text("")  # in its place nothing can be made
    baked.chmod(0o755)
    found = look(baked, {}, make=True)
    assert found.path == baked
    assert "cannot be written" in found.wrong
