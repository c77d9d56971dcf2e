"""The command itself, and `whippet doctor`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.settings import EngineSettings
from service.cli import COMMANDS, doctor, machine, main
from service.cli.doctor_text import render
from service.config.leaves import leaves
from service.config.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
DRAFT = ROOT / "models" / "demo-draft"


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """`serve` hears signals in its own way from its first line on: tests that come later in this process must not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def whippet(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("whippet ") or all(name in out for name in COMMANDS)


@pytest.mark.product
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capfd: pytest.CaptureFixture[str], name: str) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as caught:  # of argparse
        code = int(caught.code or 0)
    assert code == 0
    assert f"usage: whippet {name}" in capfd.readouterr().out


@pytest.mark.proof
def test_quant_commands_answer_with_their_exit_code(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for asked in (["evaluate", str(tmp_path / "no"), "--text", "t"], ["quantize", str(DEMO), "o", "--text", "no"]):
        assert main(asked) == 1
        said = capfd.readouterr().err
        assert len(said.strip().splitlines()) == 1
        assert "no" in said
    assert main(["quantize", "m", "o", "--threads", "0"]) == 2


WITH_MODEL = [
    ["serve", "--model"],
    ["doctor", "--model"],
    ["quantize", "--text=t", "out"],
    ["evaluate", "--text=t"],
    ["evaluate", str(DEMO), "--text=t", "--against"],
]


def with_model(asked: list[str], named: str, text: str = "t") -> list[str]:
    words = [asked[0], "--text=t", named, "out"] if asked[0] == "quantize" else [*asked, named]
    return [word.replace("--text=t", f"--text={text}") for word in words]


@pytest.mark.product
@pytest.mark.parametrize("asked", WITH_MODEL, ids=lambda asked: asked[0])
def test_what_is_no_folder_is_told_in_one_line(capfd: pytest.CaptureFixture[str], asked: list[str]) -> None:
    assert main(with_model(asked, "Org/A-1b")) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "hf download Org/A-1b" in err


@pytest.mark.product
@pytest.mark.parametrize(
    "asked", [*WITH_MODEL[:-1], pytest.param(WITH_MODEL[-1], marks=pytest.mark.proof)], ids=lambda asked: asked[0]
)
def test_an_empty_gguf_file_is_refused_by_its_name(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, asked: list[str]
) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "text").write_text("one two three " * 400)
    words = with_model(asked, str(tmp_path / "a.gguf"), str(tmp_path / "text"))
    assert main(words) == (3 if asked[0] == "serve" else 1)
    out, err = capfd.readouterr()
    assert "a.gguf" in out + err
    assert "Traceback" not in out + err


@pytest.mark.proof
def test_ctrl_c_stops_a_quantization_once(tmp_path: Path) -> None:
    """The terminal tells the whole group; the command waits for the process that does the work."""
    text = tmp_path / "text.txt"
    text.write_text("def read(path):\n    return path.read_text()\n" * 4000)
    command = [sys.executable, "-m", "service.cli", "quantize", str(DEMO), str(tmp_path / "out"), "--text", str(text)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stderr is not None
        while "layers" not in (line := child.stderr.read(1) + child.stderr.readline()):
            assert line
        os.killpg(child.pid, signal.SIGINT)
        _, rest = child.communicate(timeout=60)
    assert child.returncode == 130, rest
    assert "the same command goes on from here" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize("arguments", [[], ["nope"], ["--nope"], ["gen"]])
def test_what_is_no_command(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "whippet: error:" in capsys.readouterr().err


@pytest.mark.product
def test_serve_hands_its_flags_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--no-such-flag", "1"]) == 2
    assert "no-such-flag" in capsys.readouterr().err


@pytest.mark.product
def test_the_command_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom service.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'grpc', 'pydantic', 'torch', 'tokenizers', 'google.protobuf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.product
def test_generate_imports_no_torch() -> None:
    code = "import sys, service.cli.generate, service.cli.doctor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def proc(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_machine_is_read_as_it_is(tmp_path: Path) -> None:
    cpuinfo = (
        "processor : 0\nmodel name : Testium\nflags : fpu avx2 avx512f\n\nprocessor : 1\nmodel name : x\nflags : fpu\n"
    )
    meminfo = "MemTotal:   1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\n"
    whole = proc(tmp_path / "proc", cpuinfo=cpuinfo, meminfo=meminfo)
    free = machine.look(whole, tmp_path / "none")
    assert (free.cpu, free.features) == ("Testium", ("avx2", "avx512f"))
    assert (free.memory_bytes, free.free_bytes) == (1000 * 1024, 600 * 1024)
    limited = machine.look(whole, proc(tmp_path / "limited", memory__max="500000\n", memory__current="100000\n"))
    assert (limited.memory_bytes, limited.free_bytes) == (500_000, 400_000)
    boundless = machine.look(whole, proc(tmp_path / "boundless", memory__max="max\n", memory__current="5\n"))
    assert (boundless.memory_bytes, boundless.free_bytes) == (1000 * 1024, 600 * 1024)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    found = machine.look(tmp_path, tmp_path)
    assert (found.memory_bytes, found.free_bytes, found.features) == (None, None, ())
    assert found.cores >= 1
    assert found.cpu


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert machine.probe(address) == machine.PortState(address, "Address already in use")
    assert machine.probe(address).problem is None
    for wrong in ("nonsense", "127.0.0.1:", "127.0.0.1:99999"):
        assert machine.probe(wrong).problem == "write HOST:PORT, [ADDRESS]:PORT for IPv6"
    assert machine.probe("192.0.2.1:50051").problem is not None  # not an address of this machine


def flags(**given: Any) -> argparse.Namespace:
    ports = dict.fromkeys(("listen", "admin_listen", "health_listen", "metrics_listen"), "127.0.0.1:0")
    return argparse.Namespace(
        **{
            "model": None,
            "device": "auto",
            "dtype": "auto",
            "decoder": "auto",
            "quantization": "auto",
            "kv_dtype": "auto",
            "tensor_parallel": "auto",
            "gpu": None,
            "cache_dir": None,
            "prebuilt_dir": None,
            "digest": False,
            "draft_model": None,
            "chat_template": None,
            **ports,
            **given,
        }
    )


@pytest.mark.proof
def test_the_doctor_on_the_demo_model() -> None:
    done = whippet("doctor", "--model", str(DEMO), "--device", "cpu", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["problems"]) == (0, "", [])
    model, text = report["engine"]["model"], report["model"]["text"]
    config = json.loads((DEMO / "config.json").read_text())
    assert model["architecture"] == "Qwen3ForCausalLM"
    assert model["max_context"] == config["max_position_embeddings"]
    assert text["vocab_size"] == config["vocab_size"]
    assert text["chat"]
    assert [one["name"] for one in report["engine"]["decoders"] if one["chosen"]] == ["eager"]
    assert [one["name"] for one in report["engine"]["dtypes"] if one["chosen"]]
    assert report["machine"]["packages"]["torch"] == report["engine"]["torch"]
    told = render(report)
    for part in (str(DEMO), "Qwen3ForCausalLM", "eager: in use", "a chat template", "context 2,048 tokens"):
        assert part in told
    assert told.splitlines()[0] == "verdict    ready to serve"
    assert "not in use," not in told
    assert len(told.splitlines()) < 20
    assert render(report, everything=True).count("not in use,") > 8


@pytest.mark.product
def test_the_doctor_warns_of_a_context_that_has_no_room(engine: Engine) -> None:
    engine("""printf '{"problems": [], "warnings": ["room for 9 tokens"]}'""")
    report = doctor.examine(flags())
    assert report["problems"] == []
    assert render(report).splitlines()[:2] == ["verdict    ready to serve", "warning    room for 9 tokens"]


@pytest.mark.proof
def test_the_doctor_on_a_draft_model(tmp_path: Path) -> None:
    """Checked as a server checks it, and counted with its pages."""
    done = whippet("doctor", "--model", str(DEMO), "--draft-model", str(DRAFT), "--device", "cpu")
    assert done.returncode == 0
    assert "draft_model: in use" in done.stdout
    shutil.copytree(DRAFT, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    done = whippet("doctor", "--model", str(DEMO), "--draft-model", str(tmp_path / "other"), "--device", "cpu")
    assert done.returncode == 1
    assert f"its tokenizer.json is not that of {DEMO}" in done.stdout
    assert doctor.run(["--draft-model", str(DRAFT)]) == 2, "of which model, nobody said"


@pytest.mark.proof
def test_the_doctor_on_a_broken_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = whippet("doctor", "--model", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == ""
    problems = [line for line in done.stdout.splitlines() if str(tmp_path) in line and "; " in line]
    assert any("config.json" in line for line in problems)
    assert any("tokenizer.json" in line for line in problems)
    assert done.stdout.splitlines()[0] == "verdict    serving is impossible"


@pytest.mark.product
def test_the_doctor_on_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """The verdict first; a config is enough, and this machine is not reported on."""
    model = ROOT / "bench" / "models" / "mistral-7b-awq"
    done = whippet("doctor", "--model", str(model), "--gpu", "l4")
    assert (done.returncode, done.stderr) == (0, "")
    verdict, *lines = done.stdout.splitlines()
    assert re.fullmatch(
        r"verdict    one L4 would serve it by the fused path, at about \d+ tokens/s to one user", verdict
    )
    assert {line.split(" ")[0] for line in lines} - {""} == {
        *("model", "gpu", "decoder", "switch", "memory", "speed", "kernels"),
    }
    done = whippet("doctor", "--model", str(model), "--gpu", "l5")
    assert done.returncode == 1
    assert "gpu 'l5': is not known; use one of" in done.stdout


@pytest.mark.product
def test_the_verdict_names_the_path_of_a_gpu_that_is_not_here() -> None:
    from engine.worker.doctor import examine_gpu  # torch, which the other tests do without

    model = str(ROOT / "bench" / "models" / "mistral-7b")
    engine = asdict(examine_gpu(EngineSettings(model=model, dtype="float16"), "l4"))
    report = {"engine": engine, "model": {"folder": model, "text": None}, "problems": [], "warnings": []}
    verdict, *lines = render(report).splitlines()
    assert verdict == "verdict    one L4 would serve it by the portable path"
    assert "decoder    graph: would not, the model is float16, the kernels compute in bfloat16" in lines
    engine["plan"]["path"] = "eager"
    assert render(report).startswith(
        "verdict    one L4 would serve it eagerly, many times slower than its memory allows\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--gpu tells how a model would be served: name that by --model"),
        (["--model", str(DEMO), "--device", "cpu"], "leave out --device"),
        (["--model", str(DEMO), "--digest", "--tensor-parallel", "2"], "leave out --tensor-parallel, --digest"),
        (["--model", str(DEMO), "--draft-model", str(DRAFT)], "leave out --draft-model"),
    ],
)
def test_a_plan_for_a_gpu_takes_no_flag_that_it_would_ignore(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(["--gpu", "l4", *words]) == 2
    assert says in capsys.readouterr().err


Engine = Callable[[str], None]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """Puts a script in the place of the interpreter that is asked for the engine."""

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


@pytest.mark.product
def test_the_doctor_says_where_code_is_kept(engine: Engine, tmp_path: Path) -> None:
    engine("""printf '{"problems": []}'""")
    kept = tmp_path / "kept"
    told = render(doctor.examine(flags(cache_dir=kept)), everything=True)
    assert re.search(rf"^cache-dir  {kept}$", told, re.MULTILINE)
    assert re.search(r"^compiler   (/.*cc|/.*clang|no C compiler: .*)$", told, re.MULTILINE)
    assert not kept.exists()
    kept.mkdir(mode=0o777)
    kept.chmod(0o777)
    (problem,) = doctor.examine(flags(cache_dir=kept))["problems"]
    assert f"{kept} can be written by others" in problem
    told = render(doctor.examine(flags(prebuilt_dir=tmp_path)), everything=True)
    assert re.search(rf"^prebuilt   {tmp_path}$", told, re.MULTILINE)
    (problem,) = doctor.examine(flags(prebuilt_dir=kept))["problems"]
    assert problem.startswith(f"prebuilt-dir: {kept} can be written by others")


@pytest.mark.product
def test_an_engine_that_cannot_be_asked(engine: Engine) -> None:
    engine("echo 'Traceback' >&2; echo 'ModuleNotFoundError: No module named torch' >&2; exit 1")
    report = doctor.examine(flags())
    assert report["problems"] == [
        "the engine cannot be asked (exit code 1): ModuleNotFoundError: No module named torch"
    ]
    assert "serving is impossible" in render(report)


@pytest.mark.product
@pytest.mark.parametrize("said", ["", "nonsense", "[1, 2]", '"text"'])
def test_an_engine_that_talks_nonsense(engine: Engine, said: str) -> None:
    engine(f"printf '%s' '{said}'")
    assert doctor.examine(flags())["problems"] == ["the engine cannot be asked (exit code 0): it printed nothing"]


@pytest.mark.product
def test_an_engine_that_hangs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("exec sleep 30")
    monkeypatch.setattr(doctor, "ENGINE_TIMEOUT", 0.2)
    assert doctor.examine(flags())["problems"] == ["the engine did not report within 0.2 s"]


@pytest.mark.product
def test_problems_of_the_engine_and_missing_packages_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("""printf '{"problems": ["broken card"]}'""")
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-package",))
    report = doctor.examine(flags())
    assert report["problems"] == ["package no-such-package is not installed", "broken card"]
    assert "package no-such-package is not installed" in render(report)
    assert "no-such-package MISSING" in render(report, everything=True)


@pytest.mark.product
def test_a_taken_port_is_told_and_no_problem(engine: Engine) -> None:
    engine("""printf '{"problems": []}'""")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        report = doctor.examine(flags(listen=address))
    assert report["problems"] == []
    assert f"{address}: Address already in use" in render(report)


def test_the_doctor_takes_the_settings_of_a_server() -> None:
    """It reads them without pydantic, whose absence it would report."""
    known = {leaf.path[0]: leaf.default for leaf in leaves(Settings) if len(leaf.path) == 1}
    given = {
        name: value
        for name, value in vars(doctor._parser().parse_args([])).items()
        if name not in ("json", "digest", "all", "gpu")
    }
    assert len(given) == 15
    assert given == {name: known[name] for name in given}


def test_the_doctor_takes_no_other_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "65", "two"):
        with pytest.raises(SystemExit):
            doctor.run(["--tensor-parallel", wrong])
        assert "write auto, or a number from 1 to 64" in capsys.readouterr().err


@pytest.mark.product
def test_the_doctor_shows_what_each_rank_holds(engine: Engine) -> None:
    rank = '{"rank": 1, "heads": 2, "kv_heads": 1, "channels": 384, "tokens": 4096, "weights_bytes": 1048576}'
    switch = '{"name": "fused_kernels", "chosen": false, "reason": "it is split"}'
    fields = f'"torch": "2", "cuda": null, "threads": 1, "gpus": [], "device": "cpu", "optimizations": [{switch}]'
    engine(f"""printf '{{"problems": [], {fields}, "ranks": [{rank}]}}'""")
    text = render(doctor.examine(flags()))
    assert "1: 2 heads, 1 of keys and values, 384 channels, 4,096 tokens of the vocabulary, 1.0 MiB of weights" in text
    assert "fused_kernels: not in use, it is split" in text
