"""Makes token windows to calibrate on and to evaluate with: from a text file, or sampled from the model itself. Without
a text, calibration.txt is used. SmolLM2-135M-Instruct wrote it (`scripts/calibration_text.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from tokenizers import Tokenizer

from quant.checkpoint.config import ModelConfig
from quant.checkpoint.errors import BadFile
from quant.checkpoint.gguf.file import gguf_file, is_gguf
from quant.decoder import Decoder
from quant.errors import CannotQuantize

_TEXT_LIMIT: Final = 64 << 20  # bytes
_ENCODE_AT_ONCE: Final = 1 << 20  # characters
_KEPT_BYTES: Final = 512 << 20  # keys and values of the sequences that are written together
_TOGETHER: Final = 16  # sequences that are written together at most: these are lost where a run is stopped
SHIPPED: Final = Path(__file__).with_name("calibration.txt")


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """int64 [S, T] each. `held_out` is never calibrated on."""

    calibration: torch.Tensor
    held_out: torch.Tensor


class Kept(Protocol):
    """Tensors that outlive a run that is stopped, by name."""

    def kept(self, name: str) -> torch.Tensor | None: ...

    def keep(self, name: str, tensor: torch.Tensor) -> None: ...


def text_windows(model: Path, text: Path, length: int, count: int | None = None) -> torch.Tensor:
    """Windows of `length` tokens, evenly spread over the text and never overlapping; all of them without a count."""
    if count is not None and count < 1:
        raise CannotQuantize(f"{count} windows of text: ask for one at least")
    tokenizer = _tokenizer(model)
    prefix = _prefix(tokenizer)
    step = length - len(prefix)
    ids = _encode(tokenizer, _read(text))
    if step < 1 or len(ids) < step:
        raise CannotQuantize(f"{text.name} has {len(ids)} tokens, fewer than one window of {length}")
    windows = ids[: len(ids) // step * step].view(-1, step)
    if count is not None and count < len(windows):
        windows = windows[torch.linspace(0, len(windows) - 1, count).round().long()]
    return torch.cat((torch.tensor(prefix, dtype=torch.int64).expand(len(windows), -1), windows), dim=1)


def own_windows(
    decoder: Decoder,
    config: Mapping[str, object],
    length: int,
    count: int,
    seed: int,
    kept: Kept,
    done: Callable[[int, int], None],
) -> torch.Tensor:
    """Text that the model writes at temperature 1, from its own first token. Sequences that are whole are kept, and not
    written again. `done` gets the number of tokens that are written, of how many."""
    random = torch.Generator()
    written, total = 0, count * (length - 1)

    def pick(logits: torch.Tensor) -> torch.Tensor:
        nonlocal written
        written += len(logits)
        done(written, total)
        chances = logits.cpu().softmax(1)
        return torch.multinomial(chances, 1, generator=random).squeeze(1).to(logits.device)

    first = _first_token(config)
    together = min(_TOGETHER, max(1, _KEPT_BYTES // (kept_bytes(decoder.config) * length)))
    parts = []
    for start in range(0, count, together):
        name = f"own-{start:05}"
        part = kept.kept(name)
        if part is None:
            random.manual_seed(seed + (start << 32))  # of its own, whatever was written before
            prompts = torch.full((min(together, count - start), 1), first)
            part = decoder.generate(prompts, length - 1, pick).cpu()
            kept.keep(name, part)
        else:
            written += part.shape[0] * (length - 1)
            done(written, total)
        parts.append(part)
    return torch.cat(parts)


def kept_bytes(config: ModelConfig) -> int:
    """Keys and values of one position, in float32."""
    return 4 * 2 * config.layers * config.kv_heads * config.head_dim


def split(windows: torch.Tensor, held_out: int) -> Windows:
    """Holds out windows at regular intervals, so that both parts see all of the text."""
    if not 0 < held_out < len(windows):
        raise CannotQuantize(f"the text gives {len(windows)} windows, too few to hold {held_out} out: give more text")
    places = torch.linspace(0, len(windows) - 1, held_out).round().long()
    kept = torch.ones(len(windows), dtype=torch.bool)
    kept[places] = False
    return Windows(windows[kept], windows[places])


def _tokenizer(model: Path) -> Tokenizer:
    path = model / "tokenizer.json"
    if is_gguf(model):
        return Tokenizer.from_str(gguf_file(model).texts[path.name].decode())
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise BadFile(path, "is missing or cannot be read", "give a folder with the model's tokenizer.json") from error


def _encode(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """int64 [tokens]. Whole lines at a time: the library holds far more memory for a text than its ids take."""
    parts: list[torch.Tensor] = []
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= _ENCODE_AT_ONCE:
            parts.append(torch.tensor(tokenizer.encode("".join(lines), add_special_tokens=False).ids))
            lines, size = [], 0
    parts.append(torch.tensor(tokenizer.encode("".join(lines), add_special_tokens=False).ids))
    return torch.cat(parts).long()


def _prefix(tokenizer: Tokenizer) -> list[int]:
    bare, full = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    return list(full[: full.index(bare[0])]) if bare and bare[0] in full else []


def _read(text: Path) -> str:
    try:
        if text.stat().st_size > _TEXT_LIMIT:
            raise BadFile(text, f"is larger than {_TEXT_LIMIT >> 20} MiB", "give an excerpt")
        return text.read_text(encoding="utf-8")
    except OSError as error:
        raise BadFile(text, error.strerror or "cannot be read", "give a text file") from error
    except UnicodeDecodeError as error:
        raise BadFile(text, "is not UTF-8 text", "give a text file") from error


def _first_token(config: Mapping[str, object]) -> int:
    """Returns a document's first token: the begin token, or the end token that separates documents."""
    for field in ("bos_token_id", "eos_token_id"):
        value = config.get(field)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    raise CannotQuantize("the model's config names no bos or eos token: give a calibration text instead")
