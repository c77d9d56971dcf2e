"""Reads from a config how positions become angles; `quant.checkpoint.angles` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quant.checkpoint.fields import Fields

THETA: Final = 10000.0  # base of the angles where a config states none
THETA_OF_FULL: Final = 1e6  # the same, of layers without a window in a model whose layers with one have their own
MOST_THETA: Final = 1e30  # beyond it float32 has no angles
MOST_FACTOR: Final = 1e6  # of any stretch: published ones are below 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """Unscaled up to max_position_embeddings; beyond, the base would grow with the length of the text.

    Cached keys would then have the angles of an earlier length. So longer texts are not served, and what is served is
    exact.
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by the factor, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow dimensions interpolated, fast ones kept, a ramp between, and attention sharpened."""

    factor: float
    original_context: int
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    dim: int
    scaling: Scaling
    gain: float = 1.0  # on queries and keys alike, as they are rotated


def context_limit(max_positions: int, rope: RopeConfig) -> int:
    """Positions the model can serve: YaRN stretches a limit that the config states unstretched."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, int(rope.scaling.original_context * rope.scaling.factor))
    return max_positions


def parse_rope(fields: Fields, head_dim: int, max_positions: int) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`; where both are stated, `rope_scaling` counts."""
    section = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.file)
    return _rope(fields, section, "rope_theta", THETA, head_dim, max_positions)


def parse_ropes_by_kind(fields: Fields, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Reads the angles of layers without and with a window: `rope_parameters` by kind of layer, or `rope_theta` with
    `rope_scaling`, which is of layers without a window, and `rope_local_base_freq`."""
    empty = Fields({}, fields.file)
    kinds = fields.section("rope_parameters") or empty
    full, windowed = kinds.section("full_attention") or empty, kinds.section("sliding_attention") or empty
    scaling = fields.section("rope_scaling")
    if scaling is not None:
        full = Fields({**full.raw, **scaling.raw}, fields.file, "rope_scaling.")
    return (
        _rope(fields, full, "rope_theta", THETA_OF_FULL, head_dim, max_positions),
        _rope(fields, windowed, "rope_local_base_freq", THETA, head_dim, max_positions),
    )


def _rope(fields: Fields, section: Fields, key: str, usual: float, head_dim: int, max_positions: int) -> RopeConfig:
    """Reads the angles of a section. Its own theta wins; older configs hold it beside the section, under `key`."""
    if head_dim % 2:
        fields.refuse("head_dim", f"{head_dim} is odd, positions need pairs", "mend the config")
    beside = fields.within(key, 1.0, MOST_THETA, default=usual)
    theta = section.within("rope_theta", 1.0, MOST_THETA, default=beside)
    for holder in (fields, section):
        if holder.number("partial_rotary_factor", default=1.0) != 1.0:
            holder.refuse("partial_rotary_factor", "only whole heads are rotated", "use a model where it is 1")
    return RopeConfig(theta=theta, dim=head_dim, scaling=_scaling(fields, section, max_positions))


def _scaling(fields: Fields, section: Fields, max_positions: int) -> Scaling:
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    if kind in ("default", None):
        if any(isinstance(value, dict) for value in section.raw.values()):
            fields.refuse("rope_parameters", "per-layer-type parameters are not served", "use one set for all layers")
        return None
    if kind == "linear":
        return LinearScaling(factor=_factor(section))
    if kind == "dynamic":
        return DynamicScaling(factor=_factor(section))
    if kind == "llama3":
        return _llama3(fields, section, max_positions)
    if kind == "yarn":
        return _yarn(fields, section, max_positions)
    section.refuse("rope_type", f"{kind!r} is not served", "use default, linear, dynamic, llama3 or yarn")


def _factor(section: Fields) -> float:
    factor = section.number("factor")
    if not 1.0 <= factor <= MOST_FACTOR:
        section.refuse("factor", f"must be from 1 to {MOST_FACTOR:g}, not {factor:g}", "mend the config")
    return factor


def _original(fields: Fields, section: Fields, max_positions: int) -> int:
    """Positions before scaling; what stands beside the section wins over what stands in it."""
    key = "original_max_position_embeddings"
    holder = section if fields.raw.get(key) is None else fields
    return holder.integer(key, default=max_positions, minimum=1)


def _llama3(fields: Fields, section: Fields, max_positions: int) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not 0.0 < low < high:
        section.refuse("high_freq_factor", "must exceed low_freq_factor, both above 0", "mend the config")
    return Llama3Scaling(
        factor=_factor(section),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_original(fields, section, max_positions),
    )


def _yarn(fields: Fields, section: Fields, max_positions: int) -> YarnScaling:
    original = _original(fields, section, max_positions)
    stated = section.raw.get("factor") is not None
    return YarnScaling(
        factor=_factor(section) if stated else max_positions / original,
        original_context=original,
        attention_factor=section.optional("attention_factor", 0.0, MOST_FACTOR),
        beta_fast=_stated(section, "beta_fast") or 32.0,
        beta_slow=_stated(section, "beta_slow") or 1.0,
        mscale=_stated(section, "mscale"),
        mscale_all_dim=_stated(section, "mscale_all_dim"),
        truncate=section.boolean("truncate", default=True),
    )


def _stated(section: Fields, key: str) -> float | None:
    """0 counts as absent, as in transformers."""
    return None if section.raw.get(key) == 0 else section.optional(key, 0.0, MOST_FACTOR)
