"""Pages that follow from the code or from a table say what these say."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.figures import ROOT
from scripts.reference_adrs import MERGED, adrs_page, pages
from scripts.reference_metrics import NOTES, exported
from scripts.references import PAGES, stale
from service.config.leaves import leaves
from service.config.settings import Settings
from service.observability.metric_names import FAMILIES

OPERATIONS = ROOT / "docs" / "operations"
GENERATED = {"settings.md", "metrics.md"}


def test_this_tree_is_up_to_date() -> None:
    assert stale(ROOT) == [], "`make docs` writes them"


def test_a_page_that_differs_or_is_missing_is_named(tmp_path: Path) -> None:
    assert stale(tmp_path) == list(PAGES)
    for name, page in PAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(page(), "utf-8")
    assert stale(tmp_path) == []
    changed = next(iter(PAGES))
    (tmp_path / changed).write_text(PAGES[changed]() + "x", "utf-8")
    assert stale(tmp_path) == [changed]


def test_the_settings_page_has_every_setting_once() -> None:
    page = PAGES["docs/operations/settings.md"]()
    assert all(page.count(f"| `--{leaf.name}`") == 1 for leaf in leaves(Settings))


def test_the_metrics_page_has_every_family_once_and_no_note_is_left_over() -> None:
    page = PAGES["docs/operations/metrics.md"]()
    assert all(page.count(f"| `{exported(name, family)}` |") == 1 for name, family in FAMILIES.items())
    assert set(NOTES) <= set(FAMILIES)


@pytest.mark.parametrize(
    "path", [one for one in sorted(OPERATIONS.glob("*.md")) if one.name not in GENERATED], ids=lambda one: one.name
)
def test_a_page_for_operators_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").split()) <= 2_000


def test_there_are_six_of_them() -> None:
    assert len(list(OPERATIONS.glob("*.md"))) == 6 + len(GENERATED)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")), ids=lambda one: one.name)
def test_a_decision_is_a_page_at_most(path: Path) -> None:
    assert len(path.read_text("utf-8").split()) <= 700


def test_the_index_names_every_decision_and_where_merged_ones_are() -> None:
    found = pages(ROOT / "docs" / "adr")
    index = adrs_page(ROOT / "docs" / "adr")
    assert len(found) > 40
    assert all(f"| [{number:04}]({name}) |" in index for number, (name, _) in found.items())
    assert all(f"{gone:04} → " in index for gone in MERGED)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("0001-one.md", "# 2. One\n"),
        ("0001-one.md", "One\n"),
        ("1-one.md", "# 1. One\n"),
        ("0004-one.md", "# 4. One\n"),
    ],
)
def test_a_page_with_a_wrong_number_or_a_merged_one_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"."):
        adrs_page(tmp_path)
