"""Run one of our models in a single prefill step, without an engine; threads stand in for ranks."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.layers.placement import Placement
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig, load_model_config
from nanovllm.models.registry import get_model_class
from nanovllm.utils.context import ForwardContext
from nanovllm.utils.loader import load_model
from nanovllm.utils.parallel import ParallelContext

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def build(
    config: ModelConfig,
    *,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 512,
) -> DecoderForCausalLM:
    """Make the model with weights as they come."""
    parallel = parallel or ParallelContext.single()
    backend = SdpaBackend(
        num_heads=config.num_heads // parallel.tp_size,
        num_kv_heads=max(1, config.num_kv_heads // parallel.tp_size),
        head_dim=config.head_dim,
        max_num_seqs=4,
        dtype=dtype,
        device=CPU,
    )
    return get_model_class(config.architecture, config.quantization)(
        config, Placement(parallel, CPU, dtype), backend, max_model_len=max_model_len
    )


def load(model_dir: str | Path, **options: Any) -> DecoderForCausalLM:
    """Make the model and fill it from the directory."""
    model = build(load_model_config(model_dir), **options)
    load_model(model, model_dir)
    return model


@torch.inference_mode()
def prefill_logits(
    model: DecoderForCausalLM,
    input_ids: torch.Tensor,
    first_position: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of all tokens of one sequence, [num_tokens, vocab_size].

    kv_scales: [num_layers, 2, num_kv_heads] for a cache in fp8
    """
    num_tokens = len(input_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    attention: Any = model.model.layers[0].self_attn
    num_kv_heads = attention.qkv_proj.num_kv_heads
    shape = (2, model.config.num_layers, num_blocks, BLOCK_SIZE, num_kv_heads, attention.head_dim)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    ctx = ForwardContext(
        kv_cache=torch.zeros(
            shape, dtype=model.lm_head.weight.dtype if kv_scales is None else torch.float8_e4m3fn
        ),
        kv_scales=kv_scales,
        is_decode=False,
        slot_mapping=torch.arange(num_tokens),
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        seq_lens=starts[1:],
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens,
        host_seqlens=((num_tokens, num_tokens),),
    )
    positions = torch.arange(first_position, first_position + num_tokens)
    hidden = model(input_ids, positions, ctx)
    return model.gather_logits(model.compute_logits(hidden))


def on_ranks(tp_size: int, work: Callable[[ParallelContext], Any]) -> list[Any]:
    """Call `work` once a rank, in threads that do exchange their tensors; return the results."""
    exchange = _Exchange(tp_size)
    results: list[Any] = [None] * tp_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ParallelContext(rank, tp_size, _ThreadGroup(rank, exchange)))
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(tp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class _Exchange:
    def __init__(self, tp_size: int) -> None:
        self.barrier = threading.Barrier(tp_size, timeout=20)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * tp_size


class _ThreadGroup:
    """The two calls of a torch process group that ParallelContext makes."""

    def __init__(self, rank: int, exchange: _Exchange) -> None:
        self._rank = rank
        self._exchange = exchange

    def allreduce(self, tensors: list[torch.Tensor]) -> "_ThreadGroup":
        tensors[0].copy_(torch.stack(self._swap(tensors[0])).sum(dim=0))
        return self

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]
    ) -> "_ThreadGroup":
        for output, tensor in zip(outputs[0], self._swap(inputs[0]), strict=True):
            output.copy_(tensor)
        return self

    def wait(self) -> None:
        pass

    def _swap(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._exchange.tensors[self._rank] = tensor.clone()
        self._exchange.barrier.wait()
        tensors = list(self._exchange.tensors)
        self._exchange.barrier.wait()
        return tensors
