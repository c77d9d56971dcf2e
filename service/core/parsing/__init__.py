"""Splits a chat's answer into reasoning, calls and text. Fed in pieces of any size.

`formats.choose` finds out how a model writes these; `AnswerParser` reads one answer; `outlet.ParsedOutlet` stands
between an answer's messages and their reader. Wherever an answer is cut, the concatenated output is the same, and what
is withheld is bounded. What does not parse stays text.
"""
