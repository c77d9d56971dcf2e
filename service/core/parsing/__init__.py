"""Splits a chat's answer into reasoning, calls and text.

Wherever an answer is cut, the concatenated output is the same, and what is withheld is bounded. What does not parse
stays text.
"""
