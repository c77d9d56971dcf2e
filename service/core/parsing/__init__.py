"""A chat's answer taken apart: what the model thought, what it calls, and what it says. Fed in pieces of any size.

`formats.choose` finds out how a model writes these; `AnswerParser` reads one answer; `outlet.ParsedOutlet` stands
between an answer's messages and their reader. Wherever an answer is cut, all that is given out is the same together,
and what is held back is bounded. What does not parse stays text.
"""
