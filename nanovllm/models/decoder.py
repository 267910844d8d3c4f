"""What all dense decoder-only models share; a model file overrides what differs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear, divide
from nanovllm.layers.placement import Placement
from nanovllm.layers.rotary_embedding import rope_table
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.weights import check_weights, fill_with_noise, load_weights
from nanovllm.utils.context import ForwardContext


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """In what the attention of one architecture differs from another's."""

    qk_norm: bool
    qkv_bias: bool
    o_bias: bool


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [n, hidden_size] -> the same, or shares: see `partials`."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden_size, size = config.hidden_size, config.intermediate_size
        divide(size, place.parallel.tp_size, "intermediate_size")
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate": size, "up": size}, place
        )
        self.down_proj = RowParallelLinear(size, hidden_size, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Reading gate and up in the down projection itself was 2 % slower on an H200.
        down: torch.Tensor = self.down_proj.partials(silu_and_mul(self.gate_up_proj(x)))
        return down


class DecoderLayer(nn.Module):
    """One pre-norm block; the residual travels beside the hidden state, so adding it is fused."""

    def __init__(
        self, config: ModelConfig, place: Placement, self_attn: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = mlp

    def forward(
        self,
        positions: torch.Tensor,  # [num_tokens]
        hidden: torch.Tensor,  # [num_tokens, hidden_size], or the last layer's shares of it
        residual: torch.Tensor | None,  # [num_tokens, hidden_size], None in the first layer
        cos_sin: torch.Tensor,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, cos_sin, ctx)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DecoderModel(nn.Module):
    """Embedding, the layers and the final norm. Owns the rotary table that all layers read."""

    cos_sin: torch.Tensor  # [max_model_len, head_dim] float32

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        make_layer: Callable[[int], DecoderLayer],
        *,
        max_model_len: int,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, place)
        self.layers = nn.ModuleList(make_layer(layer_id) for layer_id in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        table = rope_table(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            max_model_len,
            device=place.device,
        )
        self.register_buffer("cos_sin", table, persistent=False)
        self.run = run_layers  # nanovllm.fused has fewer kernels for decode

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return self.run(self, input_ids, positions, ctx)


def run_layers(
    model: DecoderModel, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
) -> torch.Tensor:
    """Return the normed hidden states, [num_tokens, hidden_size], of any step of any model."""
    hidden, residual = model.embed_tokens(input_ids), None
    for layer in model.layers:
        hidden, residual = layer(positions, hidden, residual, model.cos_sin, ctx)
    normed: torch.Tensor = model.norm(hidden, residual)[0]
    return normed


class DecoderForCausalLM(nn.Module):
    """A decoder-only language model on packed tokens. Owns its weights; their addresses stay."""

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        backend: AttentionBackend,
        *,
        max_model_len: int,
    ) -> None:
        super().__init__()
        self.config = config
        self._place, self._backend = place, backend
        self.model = DecoderModel(
            config,
            place,
            lambda layer_id: self.make_layer(config, place, layer_id),
            max_model_len=max_model_len,
        )
        tied_weight = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, place, weight=tied_weight
        )
        if place.device.type == "cuda" and backend.is_capturable:  # faster only: loaded by name
            import_module("nanovllm.fused").install(self.model, place.parallel.tp_size)

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        """What the architecture's attention looks like."""
        raise NotImplementedError

    def make_mlp(self, config: ModelConfig, place: Placement, layer_id: int) -> nn.Module:
        """Build the feed-forward block of a layer; mixtures of experts override it."""
        return GatedMLP(config, place)

    def make_layer(self, config: ModelConfig, place: Placement, layer_id: int) -> DecoderLayer:
        options = self.attention_options(config)
        attention = SelfAttention(
            layer_id, place, hidden_size=config.hidden_size, num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps, qk_norm=options.qk_norm, qkv_bias=options.qkv_bias,
            o_bias=options.o_bias, backend=self._backend,
        )  # fmt: skip
        return DecoderLayer(config, place, attention, self.make_mlp(config, place, layer_id))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Return the normed hidden states, [num_tokens, hidden_size].

        input_ids, positions: [num_tokens]. K and V of these tokens are written to `ctx.kv_cache`.
        """
        hidden: torch.Tensor = self.model(input_ids, positions, ctx)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[m, hidden_size] -> local logits [m, shard_size], padding past `lm_head.num_valid`."""
        logits: torch.Tensor = self.lm_head(hidden, out)
        return logits

    def gather_logits(self, local_logits: torch.Tensor) -> torch.Tensor:
        """Collect all ranks' local logits into [m, vocab_size]."""
        return self.lm_head.gather_logits(local_logits)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False
    ) -> None:
        """Fill the parameters in place from (checkpoint name, full tensor) pairs.

        Every parameter must come exactly once, and nothing else; `partial` allows some to be left
        as they are. After an error the weights may be half old, half new.
        """
        tied_head = self.lm_head if self.config.tie_word_embeddings else None
        load_weights(self, self.split_fused(weights), tied_head=tied_head, partial=partial)

    def check_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Raise what `load_weights` of a part would raise, changing nothing."""
        weights = list(self.split_fused(weights))
        check_weights(self, weights, is_tied=self.config.tie_word_embeddings)

    def split_fused(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Take tensors apart in which a checkpoint has several of ours; here there are none."""
        return weights

    def init_dummy_weights(self, seed: int) -> None:
        """Fill the parameters in place with seeded noise, to run and measure without files."""
        generator = torch.Generator(device=self._place.device)
        # Another seed per rank, or all slices of a layer would be equal.
        fill_with_noise(self, generator.manual_seed(seed + self._place.parallel.tp_rank))
