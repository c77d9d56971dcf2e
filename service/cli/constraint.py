"""Adds flags that constrain an answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.cli.channel import UsageError
from service.pb.whippet.v1 import generation_pb2 as pb


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="the answer is JSON of this schema")
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument("--regex", metavar="REGEX", help="the whole answer matches it")
    group.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="the answer is this text, or another --choice"
    )
    group.add_argument(
        "--grammar", type=Path, metavar="FILE", help="the answer is of this EBNF grammar, Lark's or GBNF"
    )


def constraint_of(flags: argparse.Namespace) -> pb.Constraint | None:
    """Raises UsageError where a file cannot be read, ValueError where a text is not UTF-8."""
    if flags.json_schema is not None:
        return pb.Constraint(json_schema=_text(flags.json_schema))
    if flags.grammar is not None:
        return pb.Constraint(grammar=_text(flags.grammar))
    if flags.regex is not None:
        return pb.Constraint(regex=flags.regex)
    if flags.choice:
        return pb.Constraint(choice=pb.Choice(options=flags.choice))
    return pb.Constraint(json_object=True) if flags.json_object else None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: is not UTF-8") from None
