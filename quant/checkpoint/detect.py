"""Converts a model folder's config to its QuantSpec, in every dialect; refuses by name what cannot be served."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Final

from quant.checkpoint.errors import BadConfig, UnsupportedFormat
from quant.checkpoint.spec import WHOLE_ROW, AwqSpec, Int8Spec, PackedScheme, PackedSpec, QuantSpec, costly

_REQUANTIZE: Final = "quantize the original bf16 model with `whippet quantize`"
_PACKED_SUFFIXES: Final = (".qweight", ".weight_packed", ".SCB")

Section = Mapping[str, object]


def detect(config: Section, quant_config: Section | None = None, names: Collection[str] = ()) -> QuantSpec | None:
    """config: config.json; quant_config: quant_config.json where the folder has one; names: its tensors.

    None means a model that is not quantized.
    """
    section = _section(config, quant_config)
    if section is None:
        packed = next((name for name in names if name.endswith(_PACKED_SUFFIXES)), None)
        if packed is not None:
            raise BadConfig("quantization_config", f"a section, since there is a tensor {packed}", None)
        return None
    method = _method(section)
    if method == "awq":
        return _awq(section)
    if method == "compressed-tensors":
        return _packed(section)
    if method == "bitsandbytes":
        return _bitsandbytes(section)
    remedy = _REQUANTIZE if method != "gptq" else f"take the model's AWQ version, or {_REQUANTIZE}"
    raise UnsupportedFormat(f"quantization method {method[:40]!r}", remedy)


def _section(config: Section, quant_config: Section | None) -> Section | None:
    for field in ("quantization_config", "compression_config"):
        value = config.get(field)
        if value is not None:
            if not isinstance(value, Mapping):
                raise BadConfig(field, "an object", value)
            return value
    return quant_config


def _method(section: Section) -> str:
    method = section.get("quant_method")
    if method is None:
        for field, implied in (("w_bit", "awq"), ("config_groups", "compressed-tensors"), ("desc_act", "gptq")):
            if field in section:
                return implied
        if "load_in_8bit" in section or "load_in_4bit" in section:
            return "bitsandbytes"
    if not isinstance(method, str):
        raise BadConfig("quant_method", "a method's name", method)
    return method.lower().replace("_", "-")


def _awq(section: Section) -> AwqSpec:
    bits = _integer(section, "bits", "w_bit", default=4)
    version = _word(section, "version", "format", "checkpoint_format", default="gemm")
    if _word(section, "backend", default="") == "llm-awq":
        version = "llm-awq"
    if version in ("gemv-fast", "llm-awq", "marlin"):
        raise UnsupportedFormat(f"AWQ in the {version} layout", f"write it in the GEMM layout, or {_REQUANTIZE}")
    if bits != 4:
        raise UnsupportedFormat(f"AWQ with {bits} bits", _REQUANTIZE)
    if not _flag(section, "zero_point", default=True):
        raise UnsupportedFormat("AWQ without zero points", _REQUANTIZE)
    if version not in ("gemm", "gemv", "exllama", "ipex"):
        raise BadConfig("version", "gemm or gemv", version)
    group = _group(_integer(section, "group_size", "q_group_size", default=128), "group_size")
    # exllama and ipex name a kernel; their files are in the GEMM layout
    return AwqSpec("gemv" if version == "gemv" else "gemm", group, _words(section, "modules_to_not_convert"))


def _bitsandbytes(section: Section) -> Int8Spec:
    if _flag(section, "load_in_4bit", default=False) or _flag(section, "_load_in_4bit", default=False):
        raise UnsupportedFormat("bitsandbytes 4-bit (nf4, fp4)", _REQUANTIZE)
    if not (_flag(section, "load_in_8bit", default=False) or _flag(section, "_load_in_8bit", default=False)):
        raise BadConfig("load_in_8bit", "true", section.get("load_in_8bit"))
    skip = section.get("llm_int8_skip_modules")
    return Int8Spec() if skip is None else Int8Spec(_words(section, "llm_int8_skip_modules"))


def _packed(section: Section) -> PackedSpec:
    _refuse_extras(section)
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadConfig("config_groups", "at least one group", groups)
    default = _word(section, "format", default="pack-quantized")
    schemes = tuple(_scheme(f"config_groups.{name}", body, default) for name, body in groups.items())
    ignore = _words(section, "ignore")
    for rule in (*ignore, *(target for scheme in schemes for target in scheme.targets)):
        _check_rule(rule)
    return PackedSpec(schemes, ignore)


def _refuse_extras(section: Section) -> None:
    """Refuses what a compressed-tensors config may ask for beside packed weights, and would be wrong to ignore."""
    status = _word(section, "quantization_status", default="compressed")
    if status != "compressed":
        raise UnsupportedFormat(f"compressed-tensors with status {status!r}", "save it compressed")
    if section.get("kv_cache_scheme"):
        raise UnsupportedFormat("compressed-tensors with a quantized key-value cache", _REQUANTIZE)
    if section.get("transform_config"):
        raise UnsupportedFormat("compressed-tensors with rotations (transform_config)", _REQUANTIZE)
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity and _word(sparsity, "format", default="dense") != "dense":
        raise UnsupportedFormat("compressed-tensors with sparse weights", _REQUANTIZE)


def _scheme(field: str, body: object, default_format: str) -> PackedScheme:
    if not isinstance(body, Mapping):
        raise BadConfig(field, "an object", body)
    weights = body.get("weights")
    if not isinstance(weights, Mapping):
        raise BadConfig(f"{field}.weights", "an object", weights)
    layout = _word(body, "format", default=default_format)
    bits = _integer(weights, "num_bits", default=8)
    kind = _word(weights, "type", default="int")
    label = f"compressed-tensors {layout}, {kind}{bits}"
    if layout != "pack-quantized" or kind != "int" or body.get("input_activations") is not None:
        raise UnsupportedFormat(label, f"keep activations in 16 bits (W4A16 or W8A16), or {_REQUANTIZE}")
    if bits not in (4, 8):
        raise UnsupportedFormat(label, f"use 4 or 8 bits, or {_REQUANTIZE}")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise UnsupportedFormat(f"{label} with activation order", "use actorder 'weight' or none")
    group = _scheme_group(weights, f"{field}.weights")
    symmetric = _flag(weights, "symmetric", default=True)
    if bits == 8 and (group != WHOLE_ROW or not symmetric):
        raise UnsupportedFormat(f"{label} by group or with zero points", "use one symmetric scale a channel")
    return PackedScheme(_words(body, "targets"), 4 if bits == 4 else 8, group, symmetric)


def _scheme_group(weights: Section, field: str) -> int:
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "group" if isinstance(size, int) and size > 0 else "channel"
    if strategy == "channel":
        return WHOLE_ROW
    if strategy != "group":
        raise UnsupportedFormat(f"compressed-tensors by {str(strategy)[:40]}", "quantize by group or by channel")
    return _group(_integer(weights, "group_size", default=0), f"{field}.group_size")


def _check_rule(rule: str) -> None:
    if not rule.startswith("re:"):
        return
    if costly(rule[3:]):
        raise BadConfig("ignore or targets", "patterns without repeated groups", rule)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a pattern whose meaning is about to change
            re.compile(rule[3:])
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise BadConfig("ignore or targets", "patterns that compile", rule) from error


def _group(size: int, field: str) -> int:
    if size == WHOLE_ROW or (0 < size <= 1 << 20 and size % 8 == 0):
        return size
    raise BadConfig(field, "-1 (a whole row) or a multiple of 8", size)


def _first(section: Section, *fields: str) -> tuple[str, object]:
    return next(((field, section[field]) for field in fields if section.get(field) is not None), (fields[0], None))


def _integer(section: Section, *fields: str, default: int) -> int:
    field, value = _first(section, *fields)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadConfig(field, "an integer", value)
    return value


def _flag(section: Section, field: str, default: bool) -> bool:
    value = section.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadConfig(field, "true or false", value)
    return value


def _word(section: Section, *fields: str, default: str) -> str:
    field, value = _first(section, *fields)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadConfig(field, "a word", value)
    return value.lower().replace("_", "-")


def _words(section: Section, field: str) -> tuple[str, ...]:
    value = section.get(field)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise BadConfig(field, "a list of names", value)
    return tuple(value)
