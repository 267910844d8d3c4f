"""The layouts that fp8 weights come in, and what a model and a device need for them."""

from dataclasses import dataclass, replace

import torch

from nanovllm.config import Config
from nanovllm.models.model_config import ModelConfig

FP8 = torch.float8_e4m3fn
BLOCK = 128  # side of a weight's blocks, and size of the groups of activations that meet them
_MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How weights are scaled, and what a checkpoint calls the scales."""

    group_size: int | None  # BLOCK, or None: weights a scale a row, activations a scale a token
    scale_name: str | None  # None: the checkpoint has no scales, since it is quantised on loading


# By what `ModelConfig.quantization` says.
FORMATS = {
    "fp8": Fp8Format(None, None),
    "fp8_channel": Fp8Format(None, "weight_scale"),
    "fp8_block": Fp8Format(BLOCK, "weight_scale_inv"),
}


def with_quantization(model: ModelConfig, config: Config, device: torch.device) -> ModelConfig:
    """Return `model` with the format its weights will have: the checkpoint's, else the option's.

    Raises a ValueError where the model, the device or another option does not allow it.
    """
    name = model.quantization or config.quantization
    if name is None:
        return model
    if model.quantization is not None and config.lora is not None:
        raise ValueError(
            f"{config.model}: lora cannot be merged into weights that the checkpoint has in fp8. "
            "Use the one in bfloat16 with quantization='fp8', which quantises what was merged."
        )
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise ValueError(
                f"{torch.cuda.get_device_name(device)} has no fp8 arithmetic (compute capability "
                f"{capability[0]}.{capability[1]}, 8.9 is needed). Use a checkpoint in bfloat16 "
                "without quantization='fp8'."
            )
    if FORMATS[name].group_size is not None:
        _check_blocks(model, config)
    return replace(model, quantization=name)


def _check_blocks(model: ModelConfig, config: Config) -> None:
    """A block of one scale may not belong to two projections or two ranks."""
    tp_size = config.tensor_parallel_size
    parts = {
        "q": model.num_heads * model.head_dim // tp_size,
        "k and v": max(1, model.num_kv_heads // tp_size) * model.head_dim,
    }
    if model.moe is None or model.moe.dense_layers:
        parts["gate, up and down"] = model.intermediate_size // tp_size
    if model.moe is not None:
        parts["the experts' gate, up and down"] = model.moe.intermediate_size // tp_size
    advice = "Choose another tensor_parallel_size" if tp_size > 1 else "Use one in bfloat16"
    for name, size in parts.items():
        if size % BLOCK:
            raise ValueError(
                f"{config.model}: the checkpoint has a scale for each {BLOCK} x {BLOCK} block of "
                f"its weights, but a rank's part of {name} is {size} wide with "
                f"tensor_parallel_size = {tp_size}, no multiple of {BLOCK}. {advice}."
            )
