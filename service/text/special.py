"""Which tokens of a model are special, and whether BOS and EOS are put around a text: the rules of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from service.text.files import ModelFiles, one_line

CONFIG = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


@dataclass(frozen=True, slots=True)
class Special:
    """Special tokens by role, and what the tokenizer's settings add around a text."""

    named: dict[str, str]  # "bos_token" and so on → its text; templates see them under these names
    add_bos: bool | None  # None: as tokenizer.json says
    add_eos: bool | None


def _token(files: ModelFiles, value: object) -> AddedToken | None:
    """A token as the settings write it: its text, or an object with flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False) if value else None
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in FLAGS if name in value}
        return AddedToken(value["content"], **flags) if value["content"] else None
    return files.refuse(CONFIG, f"{one_line(value)} is no token") if value is not None else None


def _merged(files: ModelFiles, config: dict[str, Any]) -> dict[str, Any]:
    """The settings, with special_tokens_map.json over them where they are old enough to need it."""
    if "added_tokens_decoder" in config:
        return config
    return {**config, **files.object("special_tokens_map.json")}


def _declared(files: ModelFiles, config: dict[str, Any]) -> list[tuple[int, AddedToken]]:
    """`added_tokens_decoder`: tokens with their ids."""
    table = config.get("added_tokens_decoder") or {}
    declared = []
    try:
        for key, value in table.items():
            token = _token(files, value)
            if token is not None:
                declared.append((int(key), token))
    except (AttributeError, ValueError):
        files.refuse(CONFIG, "added_tokens_decoder is no table of ids and tokens")
    return sorted(declared, key=lambda item: item[0])


def apply_special(files: ModelFiles, backend: Backend, config: dict[str, Any]) -> Special:
    """Makes the backend know the special tokens that the settings name, and their BOS and EOS rule."""
    config = _merged(files, config)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for index, token in _declared(files, config):
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)
            if backend.token_to_id(token.content) != index:
                problem = f"{token.content!r} is not token {index} in tokenizer.json"
                files.refuse(CONFIG, problem)
    named = {}
    for role in NAMED:
        found = _token(files, config.get(role))
        if found is None:
            continue
        named[role] = found.content
        if found.content not in known and backend.token_to_id(found.content) is not None:
            found.special = True
            backend.add_tokens([found])
            known.add(found.content)
    special = Special(named, config.get("add_bos_token"), config.get("add_eos_token"))
    _wrap(files, backend, special)
    return special


def _wrap(files: ModelFiles, backend: Backend, special: Special) -> None:
    """An explicit rule in the settings replaces the one of tokenizer.json."""
    if special.add_bos is None and special.add_eos is None:
        return
    around = {}
    for role, wanted in (("bos_token", special.add_bos), ("eos_token", special.add_eos)):
        text = special.named.get(role)
        if not wanted or text is None:
            continue
        index = backend.token_to_id(text)
        if index is None:
            files.refuse(CONFIG, f"{role} {text!r} is not in tokenizer.json")
        around[role] = (text, index)
    parts = [role for role in ("bos_token", "$A", "eos_token") if role == "$A" or role in around]
    try:
        backend.post_processor = processors.TemplateProcessing(
            single=[around[part][0] if part in around else part for part in parts],
            special_tokens=list(around.values()),
        )
    except ValueError as error:
        files.refuse(CONFIG, f"add_bos_token and add_eos_token do not work out ({one_line(error)})")
