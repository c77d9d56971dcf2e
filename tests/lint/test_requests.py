"""What docs/operations/README.md tells callers to send is what the contract takes."""

from __future__ import annotations

import re

import pytest
from google.protobuf.json_format import Parse

from scripts.figures import ROOT
from service.pb.whippet.v1 import generation_pb2 as pb

TEXT = (ROOT / "docs" / "operations" / "README.md").read_text("utf-8")
SENT = re.findall(r'`("\w+": (?:"\w+"|\{.*?\}))`', TEXT)


def test_there_are_some() -> None:
    assert len(SENT) >= 6


@pytest.mark.parametrize("field", SENT)
def test_a_field_that_is_shown_is_one_of_the_contract(field: str) -> None:
    Parse("{" + field + "}", pb.GenerateStreamRequest())
