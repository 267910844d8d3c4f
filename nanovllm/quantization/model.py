"""A decoder whose linear layers are fp8: what changes in its layers, and how it loads."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.placement import Placement
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.model_config import ModelConfig
from nanovllm.moe.layer import Experts, SparseMLP
from nanovllm.quantization.experts import Fp8Experts
from nanovllm.quantization.formats import FORMATS, FP8, Fp8Format
from nanovllm.quantization.kernels.quantize import QuantTensor
from nanovllm.quantization.kernels.rms_norm import rms_norm_quantized
from nanovllm.quantization.kernels.silu_and_mul import silu_and_mul_quantized
from nanovllm.quantization.linear import Fp8Linear
from nanovllm.quantization.weights import check_scales
from nanovllm.utils.checks import errors_named
from nanovllm.utils.parallel import ParallelContext

# So end the names of all weights that are quantised, and no others: of matrices, and of stacks.
_WEIGHTS = ("_proj.weight", ".experts.gate_up_proj", ".experts.down_proj")


def quantized_class(model_class: type[DecoderForCausalLM]) -> type[DecoderForCausalLM]:
    """Return a class that builds `model_class` with the format that `config.quantization` names."""
    return type(f"Fp8{model_class.__name__}", (Fp8Decoder, model_class), {})


class Fp8RMSNorm(RMSNorm):
    """An RMSNorm that gives a QuantTensor; it shares the weight of the one it replaces."""

    def __init__(self, norm: RMSNorm, group_size: int | None) -> None:
        nn.Module.__init__(self)
        self.eps = norm.eps
        self.weight = norm.weight
        self._group_size = group_size

    def forward(  # type: ignore[override]  # what quantised linear layers take, not a tensor
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> QuantTensor | tuple[QuantTensor, torch.Tensor]:
        """As RMSNorm's, shares too. The residual may be overwritten: use the one returned."""
        out, total = rms_norm_quantized(x, residual, self.weight, self.eps, self._group_size)
        return out if residual is None else (out, total)


class Fp8MLP(nn.Module):
    """A GatedMLP whose activation is quantised as it is computed."""

    def __init__(
        self, gate_up_proj: Fp8Linear, down_proj: Fp8Linear, group_size: int | None
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._group_size = group_size

    def forward(self, x: QuantTensor) -> torch.Tensor:
        activated = silu_and_mul_quantized(self.gate_up_proj(x), self._group_size)
        return self.down_proj.partials(activated)


class Fp8Decoder(DecoderForCausalLM):
    """What `quantized_class` puts before a model class. Embedding, norms and head stay as they are.

    Layer by layer the weights, still unwritten, give way to fp8 ones: the device never holds more
    than a layer's in the model's dtype.
    """

    def make_layer(self, config: ModelConfig, place: Placement, layer_id: int) -> DecoderLayer:
        layer = super().make_layer(config, place, layer_id)
        assert config.quantization is not None, "or the class would not be this one"
        _quantize_layer(layer, FORMATS[config.quantization], place.parallel)
        return layer

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False
    ) -> None:
        """As `DecoderForCausalLM.load_weights`; weights that are not fp8 are quantised.

        A checkpoint that says its weights are fp8 must hold such; only a part, from a trainer, may
        be of another dtype, and then comes without scales.
        """
        if self._scale_name is not None and not partial:
            weights = _only_fp8(weights)
        super().load_weights(weights, partial=partial)

    def check_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        super().check_weights(weights)
        if self._scale_name is None:
            return
        weights = list(self.split_fused(weights))  # there are scales for each matrix of a stack
        dtypes = {name: tensor.dtype for name, tensor in weights}
        for name, tensor in weights:
            stem, _, last = name.rpartition(".")
            if last == self._scale_name:
                with errors_named(name):
                    check_scales(tensor)
                if dtypes.get(f"{stem}.weight") is not FP8:
                    raise ValueError(f"{name} comes without {stem}.weight in {FP8}.")
            elif dtypes[name] is FP8 and f"{stem}.{self._scale_name}" not in dtypes:
                raise ValueError(f"{name} in {FP8} comes without {stem}.{self._scale_name}.")

    @property
    def _scale_name(self) -> str | None:
        assert self.config.quantization is not None, "or the class would not be this one"
        return FORMATS[self.config.quantization].scale_name


def _quantize_layer(
    layer: DecoderLayer, weight_format: Fp8Format, parallel: ParallelContext
) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, SelfAttention) or not isinstance(mlp, (GatedMLP, SparseMLP)):
        raise ValueError(
            "fp8 weights are for layers of SelfAttention with a GatedMLP or SparseMLP; "
            f"{type(attention).__name__} and {type(mlp).__name__} cannot be quantised. Use a "
            "checkpoint in bfloat16 without quantization='fp8'."
        )
    group_size = weight_format.group_size
    for name in ("qkv_proj", "o_proj"):
        linear = getattr(attention, name)
        attention.add_module(name, Fp8Linear(linear, weight_format, parallel))
    layer.input_layernorm = Fp8RMSNorm(layer.input_layernorm, group_size)
    if isinstance(mlp, SparseMLP):  # whose router is not quantised, nor the norm before it
        assert isinstance(mlp.experts, Experts), "not quantised twice"
        mlp.experts = Fp8Experts(mlp.experts, weight_format, parallel)
        return
    gate_up_proj = Fp8Linear(mlp.gate_up_proj, weight_format, parallel)
    down_proj = Fp8Linear(mlp.down_proj, weight_format, parallel)
    layer.mlp = Fp8MLP(gate_up_proj, down_proj, group_size)
    layer.post_attention_layernorm = Fp8RMSNorm(layer.post_attention_layernorm, group_size)


def _only_fp8(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name.endswith(_WEIGHTS) and tensor.dtype is not FP8:
            raise ValueError(
                f"{name} is {tensor.dtype}, but quantization_config in config.json says that it "
                f"is {FP8}; do config.json and the weights belong together?"
            )
        yield name, tensor
