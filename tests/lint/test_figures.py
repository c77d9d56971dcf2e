"""Figures between markers: each way in which a document and the result files can part is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.figure_tables import PICTURES, RENDERERS
from scripts.figures import ROOT, documents, names, render, update
from scripts.pictures import groups
from scripts.results import FigureError, Renderer, Results

TEXT = "One <!-- f: rate -->1,234<!-- /f --> a second.\n\n<!-- figures: all -->\n| 1,234 |\n<!-- /figures -->\n"
RENDER: dict[str, Renderer] = {
    "rate": lambda results: f"{results['one']['rate']:,}",
    "all": lambda results: f"| {results['one']['rate']:,} |\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A README and one result file that agree."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "one.json").write_text(json.dumps({"rate": 1234}))
    (tmp_path / "README.md").write_text(TEXT)
    return tmp_path


def test_what_agrees_passes_and_is_left_alone(tree: Path) -> None:
    assert update(tree, RENDER, write=False) == []
    assert update(tree, RENDER, write=True) == []
    assert (tree / "README.md").read_text() == TEXT


@pytest.mark.parametrize("changed", [TEXT.replace("-->1,234<", "-->1,235<"), TEXT.replace("| 1,234 |", "| 1,235 |")])
def test_a_digit_changed_by_hand_fails_and_is_written_anew(tree: Path, changed: str) -> None:
    assert changed != TEXT
    (tree / "README.md").write_text(changed)
    (wrong,) = update(tree, RENDER, write=False)
    assert wrong.startswith("README.md: line ")
    assert "1,235" in wrong
    assert "1,234" in wrong
    assert (tree / "README.md").read_text() == changed  # --check writes nothing
    assert update(tree, RENDER, write=True) == []
    assert (tree / "README.md").read_text() == TEXT


def test_a_changed_result_fails(tree: Path) -> None:
    (tree / "bench" / "results" / "one.json").write_text(json.dumps({"rate": 99}))
    assert len(update(tree, RENDER, write=False)) == 1
    assert update(tree, RENDER, write=True) == []
    assert (tree / "README.md").read_text() == TEXT.replace("1,234", "99")


def test_a_missing_result_file_is_named(tree: Path) -> None:
    (tree / "bench" / "results" / "one.json").unlink()
    (wrong,) = update(tree, RENDER, write=False)
    assert "one.json" in wrong


def test_a_picture_is_held_to_the_results_too(tree: Path) -> None:
    pictures: dict[str, Renderer] = {"docs/rate.svg": lambda results: f"<svg>{results['one']['rate']}</svg>\n"}
    (wrong,) = update(tree, RENDER, write=False, pictures=pictures)
    assert wrong.startswith("docs/rate.svg: ")
    assert update(tree, RENDER, write=True, pictures=pictures) == []
    assert (tree / "docs" / "rate.svg").read_text() == "<svg>1234</svg>\n"
    assert update(tree, RENDER, write=False, pictures=pictures) == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_well_formed_and_shown(name: str) -> None:
    root = ElementTree.fromstring((ROOT / name).read_text("utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert f"]({name})" in (ROOT / "README.md").read_text("utf-8")


def test_the_bars_are_the_measured_rates() -> None:
    drawn = {
        (group.title, bar.engine): bar.rate
        for group in groups(Results(ROOT / "bench" / "results"))
        for bar in group.bars
    }
    summary = RENDERERS["summary-h100"](Results(ROOT / "bench" / "results"))
    assert len(drawn) > 6
    for (title, engine), rate in drawn.items():
        row = next(line for line in summary.splitlines() if line.startswith(f"| {title} |"))
        assert f"{round(rate):,}" in row, engine


@pytest.mark.parametrize("content", ["{}", "[]", "not JSON"])
def test_a_result_file_without_the_figure_is_an_error_and_no_empty_cell(tree: Path, content: str) -> None:
    (tree / "bench" / "results" / "one.json").write_text(content)
    assert len(update(tree, RENDER, write=False)) == 1
    assert len(update(tree, RENDER, write=True)) == 1
    assert (tree / "README.md").read_text() == TEXT


def test_documents_of_docs_are_held_too_but_for_the_record(tree: Path) -> None:
    (tree / "docs" / "measurements").mkdir()
    for name in ("other.md", "measurements/front.md"):
        (tree / "docs" / name).write_text(TEXT.replace("1,234", "1,235"))
    (wrong,) = update(tree, RENDER, write=False)
    assert wrong.startswith("docs/other.md: ")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- f: nobody -->1<!-- /f -->",
        "<!-- figures: nobody -->\n<!-- /figures -->",
        "<!-- f: rate -->1,234",
        "1,234<!-- /f -->",
        "<!-- figures: all -->\n| 1,234 |\n",
        "| 1,234 |\n<!-- /figures -->",
        "<!-- figures: all -->\n<!-- figures: all -->\n| 1,234 |\n<!-- /figures -->",
        "<!-- f: rate -->1 <!-- f: rate -->1,234<!-- /f -->",
        "<!--f:rate-->1,234<!--/f-->",
    ],
)
def test_a_marker_that_is_unknown_or_lacks_its_other_half_fails(tree: Path, text: str) -> None:
    with pytest.raises(FigureError):
        render(text, Results(tree / "bench" / "results"), RENDER)


def test_this_tree_agrees_with_its_results() -> None:
    assert update(ROOT, RENDERERS, write=False, pictures=PICTURES) == []


def test_every_renderer_is_used() -> None:
    assert set(RENDERERS) == {name for path in documents(ROOT) for name in names(path.read_text("utf-8"))}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "bench" / "results").glob("*-cpu.json")))
def test_every_figure_of_a_result_file_is_read_from_it(name: str, tmp_path: Path) -> None:
    """Each file has a renderer that fails without it: no table holds figures of its own."""
    folder = tmp_path / "results"
    shutil.copytree(ROOT / "bench" / "results", folder)
    (folder / f"{name}.json").unlink()
    lacking = [str(error) for error in map(failure, RENDERERS.values(), [Results(folder)] * len(RENDERERS)) if error]
    assert lacking
    assert all(name in text for text in lacking)


def failure(renderer: Renderer, results: Results) -> FigureError | None:
    try:
        renderer(results)
    except FigureError as error:
        return error
    return None


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700
