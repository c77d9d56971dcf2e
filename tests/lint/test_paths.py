"""Every path, module, setting and heading that the documents name is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from scripts.figures import ROOT
from service.config.leaves import leaves
from service.config.settings import Settings

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "helm" / "whippet" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
# The record names modules as they were called at the commit that it speaks of; the chart names values of its own.
RECORDS = ("docs/adr", "docs/measurements", "helm")
CURRENT = [path for path in DOCUMENTS if not any(path.is_relative_to(ROOT / record) for record in RECORDS)]
SETTINGS = {".".join(leaf.path) for leaf in leaves(Settings)}
GROUPS = "limits|stream|drain|auth|tls|scheduler|optimizations|fake"
PACKAGES = ("service", "engine", "cache", "quant", "bench", "scripts", "models")
FOLDERS = (*PACKAGES, "docs", "tests", "protos", "examples", "helm")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*")
DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_][\w-]*|\.\{{[\w,]+\}})+")
SETTING = re.compile(rf"(?:--)?((?:{GROUPS})\.[a-z][a-z.-]+|(?<=--)cache\.[a-z.-]+)")
RUN = re.compile(r"python -m ([\w.]+)")
BRACES = re.compile(r"\{([\w,. -]+)\}")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def spread(text: str) -> list[str]:
    """`a/{b,c}` as `a/b` and `a/c`."""
    found = BRACES.search(text)
    if found is None:
        return [text]
    return [one for part in found[1].split(",") for one in spread(text.replace(found[0], part.strip(), 1))]


def exists(path: str) -> bool:
    return any(ROOT.glob(path.rstrip("/"))) if "*" in path else (ROOT / path).exists()


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def members(path: Path) -> dict[str, set[str]]:
    """Names at the top of a module, and of each class what it holds."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        for name in bound(node):
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found[name] = {one for part in inner for one in bound(part)}
    return found


def bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [name.asname or name.name for name in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def is_module(dotted: str) -> bool:
    """A module, a package, or a name in one of them, down to a member of a class."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        rest = parts[end:]
        path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if not rest and base.is_dir():
            return True
        if path.is_file():
            names = members(path)
            return not rest or (rest[0] in names and (len(rest) == 1 or rest[1] in names[rest[0]]))
    return False


def is_setting(dotted: str) -> bool:
    return dotted.replace("-", "_") in SETTINGS


def links(path: Path) -> list[str]:
    """Links of a document that lead nowhere."""
    wrong = []
    for target in LINK.findall(FENCE.sub("", path.read_text("utf-8"))):
        if "://" in target:
            continue
        file, _, part = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        headings = [] if found.is_dir() or not found.exists() else HEADING.findall(found.read_text("utf-8"))
        if not found.exists() or (part and part not in map(anchor, headings)):
            wrong.append(target)
    return wrong


def names(text: str) -> list[str]:
    """Paths and dotted names in code marks, and modules that are run, that are not there."""
    wrong = []
    prose = FENCE.sub("", text)
    for code in CODE.findall(prose):
        for word in code.split():
            if PATH.fullmatch(word):
                wrong += [one for one in spread(word) if not exists(one)]
            elif DOTTED.fullmatch(word):
                wrong += [one for one in spread(word) if not (is_module(one) or is_setting(one) or exists(one))]
            elif (setting := SETTING.fullmatch(word)) and not is_setting(setting[1]):
                wrong.append(word)
    wrong += [module for module in RUN.findall(text) if module.startswith(PACKAGES) and not is_module(module)]
    return wrong


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert links(path) == []


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_is_there(path: Path) -> None:
    assert names(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "`engine/nowhere`",
        "`engine/{scheduling,nowhere}/`",
        "`engine.nowhere`",
        "`engine.settings.NOTHING`",
        "`service.config.settings.Settings.nothing`",
        "`cache.redis-nothing`",
        "`--cache.redis-nothing`",
        "`limits.nothing`",
        "`bench/*.nothing`",
        "`make x` and `tests/lint/test_nothing.py`",
        "```sh\npython -m bench.nothing\n```",
    ],
)
def test_what_is_not_there_is_found(text: str) -> None:
    assert names(text)


@pytest.mark.parametrize("text", ["[x](nowhere.md)", "[x](#nowhere)", "[x](docs/architecture.md#nowhere)"])
def test_a_link_to_nothing_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text("# Here\n")
    (tmp_path / "one.md").write_text(f"# Here\n\n[y](#here) {text}\n")
    assert len(links(tmp_path / "one.md")) == 1


def test_what_is_there_passes() -> None:
    modules = "`engine/{scheduling,kv}` `docs/*.md` `engine.settings.EngineSettings.model`"
    assert names(f"{modules} `cache.redis-url` `cache.response.ttl` `--limits.live-requests`") == []


def test_the_tour_leads_to_ten_files_of_the_code() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text("utf-8")
    files = {target for target in LINK.findall(tour) if target.endswith(".py")}
    assert len(files) == 10
    assert len(tour.split()) <= 1_000  # two pages
