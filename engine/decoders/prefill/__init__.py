"""Prompts on a card, in captured graphs."""
