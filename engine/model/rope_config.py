"""How positions are turned into angles, as a config says it. Torch-free; `engine.model.rope` computes the angles."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All angles divided by one factor."""

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


Scaling = LinearScaling | Llama3Scaling | YarnScaling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base and scaling of the rotary embedding."""

    theta: float
    dim: int
    scaling: Scaling


def context_limit(max_positions: int, rope: RopeConfig) -> int:
    """Positions the model can serve: YaRN stretches a limit that the config states unstretched."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, int(rope.scaling.original_context * rope.scaling.factor))
    return max_positions


def parse_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    if head_dim % 2:
        fields.refuse("head_dim", f"{head_dim} is odd, positions need pairs", "mend the config")
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.file)
    # The section's own theta wins; older configs hold it beside the section.
    theta = section.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    if theta <= 1.0:
        fields.refuse("rope_theta", f"must be above 1, not {theta}", "mend the config")
    for holder in (fields, section):
        if holder.number("partial_rotary_factor", default=1.0) != 1.0:
            holder.refuse("partial_rotary_factor", "only whole heads are rotated", "use a model where it is 1")
    return RopeConfig(theta=theta, dim=head_dim, scaling=_scaling(fields, section))


def _scaling(fields: Fields, section: Fields) -> Scaling:
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    if kind in ("default", None):
        if any(isinstance(value, dict) for value in section.raw.values()):
            fields.refuse("rope_parameters", "per-layer-type parameters are not served", "use one set for all layers")
        return None
    if kind == "linear":
        return LinearScaling(factor=_factor(section))
    if kind == "llama3":
        return _llama3(fields, section)
    if kind == "yarn":
        return _yarn(fields, section)
    section.refuse(
        "rope_type", f"{kind!r} is not served", "use default, linear, llama3 or yarn (yarn replaces dynamic scaling)"
    )


def _factor(section: Fields) -> float:
    factor = section.number("factor")
    if factor < 1.0:
        section.refuse("factor", f"must be at least 1, not {factor}", "mend the config")
    return factor


def _original(fields: Fields, section: Fields) -> int:
    outer = fields.raw.get("original_max_position_embeddings")
    holder = section if outer is None else fields
    return holder.integer(
        "original_max_position_embeddings", default=fields.integer("max_position_embeddings", minimum=1), minimum=1
    )


def _llama3(fields: Fields, section: Fields) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not 0.0 < low < high:
        section.refuse("high_freq_factor", "must exceed low_freq_factor, both above 0", "mend the config")
    return Llama3Scaling(
        factor=_factor(section),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_original(fields, section),
    )


def _yarn(fields: Fields, section: Fields) -> YarnScaling:
    def optional(key: str) -> float | None:
        return None if section.raw.get(key) is None else section.number(key)

    original = _original(fields, section)
    if section.raw.get("factor") is None:
        factor = fields.integer("max_position_embeddings", minimum=1) / original
    else:
        factor = _factor(section)
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=optional("attention_factor"),
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=section.boolean("truncate", default=True),
    )
