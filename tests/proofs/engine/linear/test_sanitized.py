"""The C code of products and of the walk under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
# Steps of every format with rows at page and split borders, one thread and two; `compare` also does torch's walk, whose
# products are the other half of the library.
STEPS = """
from dataclasses import replace
import torch
from engine.linear.products import open_products
from engine.worker.hardware import cpu_features
from tests.engine.model.layers.test_cpu_walk import FORMS, compare, rows_at
from tests.engine.model.layers.walked import Made, Shape, run

for walkers in (1, 2):
    products = open_products(cpu_features().flags, walkers=walkers)
    for form in FORMS:
        shape = Shape(form=form, hidden=72, inner=104, heads=6, kv_heads=2, dim=24, vocabulary=101, layers=1, bias=True)
        made = Made(shape, products, pages=128)
        compare(made, rows_at(0))
        compare(made, rows_at(15, 16, 17, 5, 31, 32, 33, 47, 3, 0))
        compare(made, rows_at(511, 512, 513, apart=40))
    narrow = Made(replace(shape, kv=torch.float8_e4m3fn), products, pages=128)
    run(narrow, rows_at(0, 600, apart=64), fused=True)
print("done")
"""


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc's sanitizers")
@pytest.mark.parametrize("hidden", ["", "avx512f,avx512bw,avx512vl,avx512dq"])
def test_no_access_outside_and_nothing_undefined(tmp_path: Path, hidden: str) -> None:
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("gcc has no sanitizers here")
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all\n')
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CC": str(compiler),
        "WHIPPET_CACHE_DIR": str(tmp_path / "kept"),
        "WHIPPET_PREBUILT_DIR": str(tmp_path),
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
        "CPU_HIDE_FEATURES": ",".join(filter(None, (os.environ.get("CPU_HIDE_FEATURES"), hidden))),
    }
    done = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), (done.stdout + done.stderr)[-4000:]
    assert list((tmp_path / "kept").rglob("products-*.so"))
