"""whippet-client alone: its wheel, and what that requires, in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.service.conftest import ROOT, Server

pytestmark = pytest.mark.product

STREAM = """
import asyncio, importlib.util, sys
from whippet_client import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1], timeout=60) as client:
        async with client.stream("hello", max_tokens=8) as stream:
            pieces = [message.text async for message in stream]
        print(bool(''.join(pieces)), stream.finish.usage.completion_tokens)

asyncio.run(main())
print([name for name in ("torch", "service", "engine", "numpy") if importlib.util.find_spec(name)])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT / "clients" / "python", capture_output=True, timeout=120)
    [found] = folder.glob("whippet_client-*.whl")
    return found


def required(one: Distribution) -> set[str]:
    wanted = [Requirement(line) for line in one.requires or ()]
    return {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})}


def closure(names: Iterable[str]) -> dict[str, Distribution]:
    """What is required, and what that requires, as it is installed here."""
    found: dict[str, Distribution] = {}
    left = set(names)
    while left:
        name = left.pop()
        found[name] = distribution(name)
        left |= required(found[name]) - found.keys()
    return found


def link(one: Distribution, site: Path) -> None:
    for file in one.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(file.locate())).resolve())


def test_alone_it_streams_an_answer(wheel: Path, server: Server, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    [info] = site.glob("whippet_client-*.dist-info")
    needs = closure(required(PathDistribution(info)))
    for one in needs.values():
        link(one, site)
    assert needs.keys() == {"googleapis-common-protos", "grpcio", "protobuf", "typing-extensions"}
    python = tmp_path / "venv" / "bin" / "python"
    said = subprocess.run(
        [python, "-I", "-c", STREAM, server.data], check=True, capture_output=True, text=True, timeout=120
    )
    assert said.stdout.splitlines() == ["True 8", "[]"]


def test_the_wheel_has_types_and_licence_and_nothing_of_the_server(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert "whippet_client/py.typed" in names
    assert "whippet_client/pb/whippet/v1/generation_pb2.pyi" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"whippet_client"}
