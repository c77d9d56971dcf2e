"""Finds a model's special tokens by the rules of transformers 5. tokenizer.json's post-processor alone decides about
BOS: transformers ignores `add_bos_token`, too."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from service.core.text.files import ModelFiles, one_line

CONFIG = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def _token(files: ModelFiles, value: object) -> AddedToken | None:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False) if value else None
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in FLAGS if name in value}
        return AddedToken(value["content"], **flags) if value["content"] else None
    return files.refuse(CONFIG, f"{one_line(value)} is no token") if value is not None else None


def _merged(files: ModelFiles, config: dict[str, Any]) -> dict[str, Any]:
    """special_tokens_map.json overrides settings that are old enough to need it."""
    if "added_tokens_decoder" in config:
        return config
    return {**config, **files.object("special_tokens_map.json")}


def _declared(files: ModelFiles, config: dict[str, Any]) -> list[tuple[int, AddedToken]]:
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


def apply_special(files: ModelFiles, backend: Backend, config: dict[str, Any]) -> dict[str, str]:
    """Makes the backend know the special tokens. Returns those with a role, by templates' names ("bos_token")."""
    config = _merged(files, config)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new: dict[str, tuple[int, AddedToken]] = {}
    for index, token in _declared(files, config):
        if token.content not in known:
            new.setdefault(token.content, (index, token))
    backend.add_tokens([token for _, token in new.values()])  # one by one, each would cost as much as all
    for content, (index, _) in new.items():
        known.add(content)
        if backend.token_to_id(content) != index:
            files.refuse(CONFIG, f"{content!r} is not token {index} in tokenizer.json")
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
    return named
