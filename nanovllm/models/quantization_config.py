"""Read `quantization_config` of config.json: two layouts of fp8 are known, all others refused."""

from typing import Any

_SUPPORTED = (
    "supported are fp8 with weight_block_size [128, 128] and dynamic activations (Qwen's -FP8 "
    "releases), and compressed-tensors 'float-quantized' with a weight scale a channel and dynamic "
    "activation scales a token (FP8-dynamic). Or use the checkpoint in bfloat16, which "
    "quantization='fp8' quantises while it loads."
)
_KEYS = ("quantization_config", "compression_config")  # the second in older files
# What may stay as it is: what is never quantised here. Names end so.
_NEVER_QUANTIZED = ("lm_head", "embed_tokens", "norm", "gate")


def read_quantization(d: dict[str, Any]) -> str | None:
    """Return "fp8_block", "fp8_channel" or None; a ValueError names what is not supported."""
    stated = {key: d[key] for key in _KEYS if d.get(key) is not None}
    if len(stated) == 2 and stated[_KEYS[0]] != stated[_KEYS[1]]:
        raise ValueError(f"{' and '.join(_KEYS)} differ; remove the one that is not true.")
    for key, found in stated.items():
        if not isinstance(found, dict):
            raise TypeError(f"{key} must be an object, got {found!r}; {_SUPPORTED}")
        method = found.get("quant_method")
        if not isinstance(method, str) or method not in _READERS:
            raise ValueError(f"{key}: quant_method {method!r} is not supported; {_SUPPORTED}")
        return _READERS[method](found, key)
    return None


def _read_fp8(found: dict[str, Any], place: str) -> str:
    _check_fields(
        found,
        place,
        {
            "activation_scheme": ("dynamic",),
            "weight_block_size": ([128, 128],),
            "fmt": ("e4m3", None),
            "scale_fmt": ("float", None),
            "expert_dtype": ("fp8", None),
            "dequantize": (False, None),
            "modules_to_convert": (None, []),
        },
    )
    for key in ("modules_to_not_convert", "ignored_layers"):
        _check_left_out(found.get(key) or [], f"{place}.{key}")
    return "fp8_block"


def _read_compressed_tensors(found: dict[str, Any], place: str) -> str:
    _check_fields(
        found,
        place,
        {
            "format": ("float-quantized",),
            "quantization_status": ("compressed", "frozen", None),
            "kv_cache_scheme": (None,),
            "sparsity_config": (None, {}),
            "transform_config": (None, {}),
        },
    )
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(f"{place}.config_groups must hold one group, got {groups!r}; {_SUPPORTED}")
    ((name, group),) = groups.items()
    place_of_group = f"{place}.config_groups.{name}"
    if not isinstance(group, dict):
        raise TypeError(f"{place_of_group} must be an object, got {group!r}.")
    _check_fields(
        group,
        place_of_group,
        {
            "targets": (["Linear"],),
            "output_activations": (None,),
            "format": (None, "float-quantized"),
        },
    )
    for part, strategy, is_dynamic in (
        ("weights", "channel", False),
        ("input_activations", "token", True),
    ):
        scheme = group.get(part)
        if not isinstance(scheme, dict):
            raise ValueError(f"{place_of_group}.{part} must be an object, got {scheme!r}.")
        _check_fields(
            scheme,
            f"{place_of_group}.{part}",
            {
                "num_bits": (8,),
                "type": ("float",),
                "strategy": (strategy,),
                "dynamic": (is_dynamic,),
                "symmetric": (True, None),
                "group_size": (None,),
                "block_structure": (None,),
                "actorder": (None,),
            },
        )
    ignored = found.get("ignore") or []
    _check_left_out(ignored, f"{place}.ignore")
    if not any(name.removesuffix("$").endswith("lm_head") for name in ignored):
        raise ValueError(
            f"{place}.ignore is {ignored!r}, so lm_head is quantised, which is not supported; "
            f"{_SUPPORTED}"
        )
    return "fp8_channel"


_READERS = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}


def _check_fields(found: dict[str, Any], place: str, allowed: dict[str, tuple[Any, ...]]) -> None:
    for key, values in allowed.items():
        value = found.get(key)
        # 1 == True, but the one is no switch and the other no number.
        if not any(value == other and type(value) is type(other) for other in values):
            raise ValueError(f"{place}.{key} is {value!r}, which is not supported; {_SUPPORTED}")


def _check_left_out(names: Any, place: str) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{place} must be a list of names, got {names!r}.")
    for name in names:
        if not name.removesuffix("$").endswith(_NEVER_QUANTIZED):  # "re:.*gate$" is a pattern
            raise ValueError(
                f"{place} leaves {name!r} unquantised, which is not supported: all linear layers "
                f"of the decoder must be quantised; {_SUPPORTED}"
            )
