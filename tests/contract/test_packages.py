"""The four plain package names are this checkout's, and the front needs no torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["service", "engine", "cache", "quant"])
def test_package_is_this_checkouts(name: str) -> None:
    found = importlib.import_module(name).__file__
    assert found is not None
    assert Path(found).resolve() == ROOT / name / "__init__.py"


@pytest.mark.product
@pytest.mark.parametrize(
    "module", ["service.serving", "service.cli", "engine.client", "engine.fake", "engine.scheduling.scheduler"]
)
def test_module_imports_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.product
def test_the_engine_process_is_told_what_to_load_before_the_server_imports_its_own() -> None:
    """`service.main` needs no more for that than the settings and their message."""
    code = (
        "import service.main, engine.ipc.frames, sys; sys.exit(bool({'grpc', 'numpy', 'tokenizers'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_generated_stubs_serve_the_names_of_the_protos() -> None:
    from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2

    names = {module.DESCRIPTOR.name for module in (admin_pb2, generation_pb2, model_pb2)}
    assert names == {f"whippet/v1/{stem}.proto" for stem in ("admin", "generation", "model")}


def test_stream_request_has_the_fields_of_the_unary_one() -> None:
    from service.pb.whippet.v1 import generation_pb2

    def fields(name: str) -> list[tuple[str, int, int]]:
        message = generation_pb2.DESCRIPTOR.message_types_by_name[name]
        return [(field.name, field.number, field.type) for field in message.fields]

    assert fields("GenerateRequest") == fields("GenerateStreamRequest")
