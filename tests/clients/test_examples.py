"""The examples, run as their README says, against a whole server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import ROOT, Server
from whippet_client.endpoint import MOST_ATTEMPTS, service_config

EXAMPLES = ROOT / "examples"
PROTOS = ROOT / "protos"
BUF = ROOT / ".tools" / "node_modules" / ".bin" / "buf"
NODE = shutil.which("node") or "node"
# Command → what it needs in its environment.
COMMANDS = {
    "python": (
        [sys.executable, str(EXAMPLES / "python" / "stream.py")],
        {"PYTHONPATH": str(ROOT / "clients" / "python")},
    ),
    "node": ([NODE, str(EXAMPLES / "node" / "stream.js")], {"NODE_PATH": str(ROOT / ".tools" / "node_modules")}),
}


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, needs = COMMANDS[name]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **needs, **environment}
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_it_streams_an_answer(server: Server, name: str) -> None:
    said = run(name, "hello", server.data)
    assert said.returncode == 0, said.stderr
    assert "64 tokens" in said.stderr
    assert len(said.stdout) > 16


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_is_wrong(server: Server, name: str, tmp_path: Path) -> None:
    said = run(name, "hello", server.data, WHIPPET_TOKEN="t")
    assert said.returncode == 0, said.stderr
    said = run(name, "", server.data)
    assert said.returncode != 0
    assert "Traceback" not in said.stderr
    assert "text" in said.stderr


def test_one_retry_policy_is_advised_everywhere() -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    go = (EXAMPLES / "go" / "main.go").read_text("utf-8")
    everything = service_config(MOST_ATTEMPTS)
    assert json.loads(page.partition("```json\n")[2].partition("```")[0]) == everything
    [said] = json.loads(go.partition("serviceConfig = `")[2].partition("`")[0])["methodConfig"]
    [meant] = everything["methodConfig"]  # type: ignore[misc]
    assert said["retryPolicy"] == meant["retryPolicy"]
    node = (EXAMPLES / "node" / "stream.js").read_text("utf-8")
    assert all(json.dumps(value) in node for value in meant["retryPolicy"].values())


def make_stubs(out: Path, *flags: str) -> None:
    """By protoc as a caller has it, from the contract alone."""
    protos = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "whippet").rglob("*.proto"))
    subprocess.run(["protoc", f"-I{PROTOS}", *flags, *protos], check=True, cwd=out, timeout=120)


@pytest.mark.product
def test_the_contract_makes_stubs_where_its_options_say(tmp_path: Path) -> None:
    for folder in ("go", "java", "csharp", "objc"):
        (tmp_path / folder).mkdir()
    flags = ("--go_out=go", "--go-grpc_out=go", "--java_out=java", "--csharp_out=csharp", "--objc_out=objc")
    make_stubs(tmp_path, *flags)
    go = tmp_path / "go" / "whippet" / "v1"
    assert {one.name for one in go.iterdir()} >= {"generation.pb.go", "generation_grpc.pb.go", "errors.pb.go"}
    assert all("\npackage whippetv1\n" in one.read_text() for one in go.iterdir())
    java = tmp_path / "java" / "com" / "whippet" / "v1"
    assert {"GenerateRequest.java", "ErrorReason.java", "GenerationProto.java"} <= {one.name for one in java.iterdir()}
    assert "namespace Whippet.V1 {" in (tmp_path / "csharp" / "Generation.cs").read_text()
    assert "@interface WHPGenerateRequest " in next((tmp_path / "objc").rglob("Generation.pbobjc.h")).read_text()


@pytest.mark.product
def test_buf_generate_makes_the_same_stubs(tmp_path: Path) -> None:
    """Without a plugin from elsewhere."""
    for maker in ("protoc", "buf"):
        for language in ("go", "java"):
            (tmp_path / maker / language).mkdir(parents=True)
    make_stubs(tmp_path / "protoc", "--go_out=go", "--go-grpc_out=go", "--java_out=java")
    go = [{"local": name, "out": "go"} for name in ("protoc-gen-go", "protoc-gen-go-grpc")]
    (tmp_path / "buf.gen.json").write_text(
        json.dumps({"version": "v2", "plugins": [*go, {"protoc_builtin": "java", "out": "java"}]})
    )
    flags = ("--template", tmp_path / "buf.gen.json", "--path", PROTOS / "whippet", "-o", tmp_path / "buf")
    subprocess.run([BUF, "generate", ROOT, *flags], check=True, timeout=120)
    by_protoc, by_buf = (
        {str(path.relative_to(tmp_path / maker)) for path in (tmp_path / maker).rglob("*.*")}
        for maker in ("protoc", "buf")
    )
    assert by_buf == by_protoc
    assert len(by_buf) > 100


@pytest.mark.slow
def test_the_example_in_go_is_compiled_and_streams(server: Server, tmp_path: Path) -> None:
    """With Debian's packages of grpc-go, which lie in a GOPATH. `make examples` installs them."""
    folder = tmp_path / "src" / "whippet-example"
    (folder / "gen").mkdir(parents=True)
    shutil.copy(EXAMPLES / "go" / "main.go", folder)
    make_stubs(folder, "--go_out=gen", "--go-grpc_out=gen")
    paths = {"GOPATH": f"{tmp_path}:/usr/share/gocode", "GOCACHE": str(tmp_path / "cache"), "GO111MODULE": "off"}
    environment = {**os.environ, **paths}
    subprocess.run(["go", "build", "-o", "stream", "."], check=True, cwd=folder, env=environment, timeout=600)
    said = subprocess.run([folder / "stream", "hello", server.data], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert "64 tokens" in said.stderr
    assert len(said.stdout) > 16
