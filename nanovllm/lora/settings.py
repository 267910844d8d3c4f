"""Read a PEFT adapter's adapter_config.json: how strong each module's update is, or a refusal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import check_bool, check_float, check_int, errors_named
from nanovllm.utils.json_file import read_json_object

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"  # in target_modules: every linear layer but the head
_MERGE_YOURSELF = (
    "Merge it with PEFT's merge_and_unload(), save the result, and pass that as the model."
)
_READ = frozenset(
    (
        *("peft_type", "task_type", "base_model_name_or_path", "target_modules", "bias"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("exclude_modules", "layers_to_transform", "layers_pattern"),
    )
)
# Whatever they say, the merged weights are the same.
_NEUTRAL = frozenset(
    (
        *("auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"),
        *("runtime_config", "megatron_config", "megatron_core", "eva_config", "qalora_group_size"),
        "ensure_weight_tying",
    )
)
_MAX_ALPHA = 1e6  # far above every adapter; what is added must stay finite
_NESTED_REPEATS = re.compile(r"\)[*+{]")  # a group: (a+)+, (a|a)*, (a?){60}
# Each multiplies the time to see that a name does not match: .*.*.*.*.*.*.*.*x takes seconds.
_REPEATS = re.compile(r"[*+{]|(?<![*+}?(])\?")
_MAX_REPEATS, _MAX_GROUPS = 5, 12
# Others, such as PiSSA and LoftQ, begin by changing the base weights.
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What adapter_config.json says, checked: plain LoRA on linear layers of a causal model."""

    base_model: str | None
    target_modules: tuple[str, ...] | str  # ends of module names, or one regex, or ALL_LINEAR
    exclude_modules: tuple[str, ...] | str  # the same, for what is left out
    layers_to_transform: tuple[int, ...]  # of targets named by their ends; empty: all layers
    layers_pattern: tuple[str, ...]  # what the list of layers is called; empty: anything
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]  # (regex of a module's name or of its end, r)
    alpha_pattern: tuple[tuple[str, float], ...]

    def rank(self, module: str) -> int:
        """The rank that `module`, such as "model.layers.0.mlp.up_proj", must have."""
        return next((r for key, r in self.rank_pattern if _names(key, module)), self.r)

    def scale(self, module: str) -> float:
        """What B @ A is multiplied with: alpha / r, or alpha / sqrt(r) for rank-stabilised ones."""
        matching = (alpha for key, alpha in self.alpha_pattern if _names(key, module))
        alpha, r = next(matching, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(r) if self.use_rslora else r)

    def is_target(self, name: str, module: str) -> bool:
        """Whether `name` of `target_modules` stands for the linear layer `module`."""
        if self.target_modules == ALL_LINEAR:
            return module != "lm_head"
        if isinstance(self.target_modules, str):
            return re.fullmatch(name, module) is not None
        return _is_end(name, module)

    def is_trained(self, name: str, module: str) -> bool:
        """Whether a target is in a layer that was to be trained, and not excluded."""
        if isinstance(self.exclude_modules, str):
            is_excluded = re.fullmatch(self.exclude_modules, module) is not None
        else:
            is_excluded = any(_is_end(excluded, module) for excluded in self.exclude_modules)
        # A module that is named in full is trained whatever its layer, in PEFT too.
        layers = () if name == module else self.layers_to_transform
        return not is_excluded and (not layers or self.layer_number(module) in layers)

    def layer_number(self, module: str) -> int | None:
        """Which of its layers a module belongs to; None for one outside of them."""
        for pattern in self.layers_pattern or (r"[^.]*",):
            # Lazy, since experts have numbers too, inside their layer.
            if match := re.match(rf"(?:.*?\.)??(?:{pattern})\.(\d+)\.", module):
                return int(match[match.lastindex or 0])
        return None


def read_settings(directory: Path) -> AdapterSettings:
    """Read and check the file in an adapter's directory; errors name it, the field and the value.

    Format: https://huggingface.co/docs/peft/main/en/package_reference/lora
    """
    path = directory / CONFIG_NAME
    d = read_json_object(path)
    with errors_named(path):
        return _read(d)


def _read(d: dict[str, Any]) -> AdapterSettings:
    if d.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {d.get('peft_type')!r}.")
    if d.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"task_type must be 'CAUSAL_LM' or null, got {d['task_type']!r}: an adapter for "
            "another task brings layers of its own."
        )
    _refuse_variants(d)
    base_model = d.get("base_model_name_or_path")
    return AdapterSettings(
        base_model=base_model if isinstance(base_model, str) and base_model else None,
        target_modules=_read_targets(d.get("target_modules")),
        exclude_modules=_names_or_regex("exclude_modules", d.get("exclude_modules") or []),
        layers_to_transform=_read_layers(d),
        layers_pattern=_read_layers_pattern(d),
        r=check_int("r", d.get("r"), minimum=1),
        lora_alpha=_alpha("lora_alpha", d.get("lora_alpha")),
        use_rslora=d.get("use_rslora") is not None and check_bool("use_rslora", d["use_rslora"]),
        rank_pattern=tuple(
            (key, check_int(f"rank_pattern[{key!r}]", value, minimum=1))
            for key, value in _pattern(d, "rank_pattern")
        ),
        alpha_pattern=tuple(
            (key, _alpha(f"alpha_pattern[{key!r}]", value))
            for key, value in _pattern(d, "alpha_pattern")
        ),
    )


def _refuse_variants(d: dict[str, Any]) -> None:
    if d.get("bias", "none") != "none":
        raise ValueError(f"bias must be 'none', got {d['bias']!r}. {_MERGE_YOURSELF}")
    init = d.get("init_lora_weights", True)
    if init not in _KEEP_BASE:
        raise ValueError(
            f"init_lora_weights = {init!r} is not supported: such an adapter belongs to base "
            f"weights that its training has changed. {_MERGE_YOURSELF}"
        )
    for key, value in d.items():
        # Not only the variants that we know: one that is unknown would give wrong text.
        if key not in _READ and key not in _NEUTRAL and value:
            raise ValueError(f"{key} = {value!r:.100} is not supported. {_MERGE_YOURSELF}")


def _read_targets(value: Any) -> tuple[str, ...] | str:
    if value in (None, [], ""):
        raise ValueError(
            f"target_modules is {value!r}, so whether the file is complete cannot be said. "
            "List there which modules were trained, such as 'q_proj', as PEFT does."
        )
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    return _names_or_regex("target_modules", value)


def _names_or_regex(key: str, value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str):
        return _regex(key, value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{key} must be a list of names or a regex, got {value!r}.")
    return tuple(value)


def _read_layers(d: dict[str, Any]) -> tuple[int, ...]:
    value = d.get("layers_to_transform")
    if value is None or value == []:
        return ()
    if isinstance(d.get("target_modules"), str):
        raise ValueError(
            f"layers_to_transform = {value!r:.100} goes with a list in target_modules, not with "
            f"{d['target_modules']!r:.100}: name the layers in that."
        )
    numbers = value if isinstance(value, list) else [value]
    return tuple(check_int("layers_to_transform", number, minimum=0) for number in numbers)


def _read_layers_pattern(d: dict[str, Any]) -> tuple[str, ...]:
    value = d.get("layers_pattern")
    if value in (None, [], ""):
        return ()
    if d.get("layers_to_transform") in (None, []):
        raise ValueError(
            f"layers_pattern = {value!r:.100} needs layers_to_transform: which of the layers."
        )
    names = _names_or_regex("layers_pattern", value)
    return tuple(
        _regex("layers_pattern", n) for n in ([names] if isinstance(names, str) else names)
    )


def _pattern(d: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    value = d.get(key)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise TypeError(f"{key} must be an object, got {value!r}.")
    return [(_regex(key, pattern), item) for pattern, item in value.items()]


def _alpha(name: str, value: Any) -> float:
    return check_float(name, value, minimum=-_MAX_ALPHA, maximum=_MAX_ALPHA)


def _regex(key: str, text: str) -> str:
    if _NESTED_REPEATS.search(text):
        raise ValueError(
            f"{key} has {text!r:.200}, which repeats a group: to match it may take for ever. "
            f"{_MERGE_YOURSELF}"
        )
    num_repeats, num_groups = len(_REPEATS.findall(text)), text.count("(")
    if num_repeats > _MAX_REPEATS or num_groups > _MAX_GROUPS:
        raise ValueError(
            f"{key} has {text!r:.200}, with {num_repeats} repeats and {num_groups} groups: to "
            f"match it may take for ever. At most {_MAX_REPEATS} and {_MAX_GROUPS} are read. "
            f"{_MERGE_YOURSELF}"
        )
    try:
        re.compile(text)
        if key not in ("target_modules", "exclude_modules"):
            re.compile(f"(?:{text})")  # as it is used: flags would have to stand first
    except re.error as error:
        raise ValueError(
            f"{key} has {text!r:.200}, which is no regular expression: {error}."
        ) from error
    return text


def _is_end(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _names(pattern: str, module: str) -> bool:
    """Whether a key of rank_pattern or alpha_pattern stands for a module, as in PEFT."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
