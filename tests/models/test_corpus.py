"""Which files become training text, on a small made-up Lib/."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.train import corpus
from models.train.prepare import digest, repeated_lines

SECRET = "def zygomorphic_{0}():\n    '''Only {0} says so.'''\n    return 'zygomorphic {0}'\n"


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    for name in corpus.held_out_names():
        write(tmp_path / name, SECRET.format(name.replace("/", "_").removesuffix(".py")))
    write(tmp_path / "birds.py", '"""About birds."""\n\ndef fly():\n    """Fly away."""\n')
    write(tmp_path / "test/test_birds.py", "def test_fly():\n    pass\n")
    write(tmp_path / "pydoc_data/topics.py", "topics = {'lambda': 'Small\\n   functions.'}\n")
    return tmp_path


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def names(documents: list[corpus.Document]) -> list[str]:
    return [document.name for document in documents]


def test_held_out_text_is_never_trained_on(lib: Path) -> None:
    splits = corpus.documents(lib)
    assert not [document for document in splits["train"] if "zygomorphic" in document.text]
    wanted = corpus.held_out_names()
    for split in ("valid", "heldout"):
        assert names(splits[split]) == sorted(name for name, where in wanted.items() if where == split)


def test_modules_come_twice_and_tests_once_and_both_are_spoken_of(lib: Path) -> None:
    train = names(corpus.documents(lib)["train"])
    assert train.count("birds.py") == 2
    assert train.count("topic:lambda") == 2
    assert train.count("test/test_birds.py") == 1
    assert "chat:birds.py" in train
    assert "chat:test/test_birds.py" not in train
    assert {"chat:whippet", "chat:topics"} <= set(train)


def test_is_the_same_every_time(lib: Path) -> None:
    first, second = corpus.documents(lib), corpus.documents(lib)
    assert digest(first) == digest(second)
    write(lib / "birds.py", "different = True\n")
    assert digest(corpus.documents(lib)) != digest(first)


def test_a_lib_without_a_held_out_module_is_refused(lib: Path) -> None:
    (lib / "heapq.py").unlink()
    with pytest.raises(ValueError, match=r"lacks held-out modules: heapq\.py"):
        corpus.documents(lib)


def test_a_lib_without_tests_is_used(lib: Path) -> None:
    for path in (lib / "test").rglob("*.py"):
        path.unlink()
    assert all(not name.startswith("test/") for name in names(corpus.documents(lib)["heldout"]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("site-packages/other.py", "x = 1\n"),
        ("a/__pycache__/other.py", "x = 1\n"),
        ("ensurepip/_bundled/other.py", "x = 1\n"),
        ("_sysconfigdata__linux.py", "build = 1\n"),
        ("config-3.11-x86/python-config.py", "build = 1\n"),
        ("encodings/cp1252.py", "table\n"),
        ("latin.py", b"# -*- coding: latin-1 -*-\nx = '\xe9'\n"),
        ("table.py", "0x00, 0x01, 0x02\n" * 40),
        ("large.py", "word\n" * 100_000),
        ("empty.py", "\n"),
    ],
)
def test_is_left_out(lib: Path, name: str, content: str | bytes) -> None:
    write(lib / name, content)
    assert name not in names(list(corpus.source_files(lib)))


def test_line_ends_are_unix(lib: Path) -> None:
    write(lib / "dos.py", b"a = b\r\nc = d\r\n")
    (dos,) = [document for document in corpus.source_files(lib) if document.name == "dos.py"]
    assert dos.text == "a = b\nc = d\n"


def test_the_list_names_each_file_once_and_keeps_tests_with_their_module() -> None:
    lines = (Path(corpus.__file__).parent / "heldout.txt").read_text("utf-8").splitlines()
    listed = [line.split()[1] for line in lines if not line.startswith("#")]
    assert len(listed) == len(set(listed)) == len(corpus.held_out_names())
    assert "heapq.py" in listed
    assert "test/test_heapq.py" in listed


def test_repeated_lines_counts_long_lines_only() -> None:
    line = "a line that is long enough to be more than boilerplate"
    seen = [corpus.Document("a", f"{line}\nshort\n")]
    unseen = [corpus.Document("b", f"   {line}\nshort\n{line} and more\n")]
    assert repeated_lines(seen, unseen) == 0.5
    assert repeated_lines(seen, []) == 0.0
