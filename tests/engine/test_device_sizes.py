"""What a device can hold and run, told from numbers: KV blocks, dtypes, ranks, graph sizes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_harness import on_ranks

from nanovllm.config import Config
from nanovllm.engine.cuda_graph import graph_sizes
from nanovllm.engine.kv_cache import (
    KVCacheShape,
    MemoryUse,
    num_blocks_on_cpu,
    num_blocks_on_cuda,
    sampling_bytes,
)
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.placement import Placement
from nanovllm.models.model_config import load_model_config
from nanovllm.utils.device import resolve_device, resolve_dtype

GIB = 2**30
SHAPE = KVCacheShape(32, 64, 8, 128, torch.bfloat16)  # 8 MiB a block
CUDA = torch.device("cuda")
ALONE = MemoryUse(80 * GIB, 60 * GIB, 79 * GIB, weights=16 * GIB, activations=4 * GIB)


def test_the_share_of_a_gpu_counts_what_this_engine_uses_and_no_other():
    """A second engine at 0.4 once saw less than nothing, as the first one's memory was its own."""
    first = num_blocks_on_cuda(ALONE, 0.4, SHAPE)
    assert first * SHAPE.block_bytes == (32 - 19 - 4) * GIB
    beside = replace(ALONE, free=28 * GIB, free_at_start=47 * GIB)  # the first has taken 32 GiB
    assert num_blocks_on_cuda(beside, 0.4, SHAPE) == first


def test_no_more_is_taken_than_is_free_and_a_little_is_left():
    crowded = replace(ALONE, free=10 * GIB, free_at_start=29 * GIB)
    num_bytes = num_blocks_on_cuda(crowded, 0.9, SHAPE) * SHAPE.block_bytes
    assert num_bytes == 10 * GIB - 4 * GIB - GIB // 4
    grown = replace(ALONE, free=79 * GIB, free_at_start=60 * GIB)  # another has ended meanwhile
    assert num_blocks_on_cuda(grown, 0.5, SHAPE) * SHAPE.block_bytes == 36 * GIB


@pytest.mark.parametrize(
    ("memory", "utilization"),
    [(ALONE, 0.2), (replace(ALONE, free=4 * GIB, free_at_start=23 * GIB), 0.9)],
    ids=["too small a share", "too little is free"],
)
def test_no_room_for_a_block_is_an_error_with_the_whole_sum(memory, utilization):
    with pytest.raises(ValueError, match="No room for the KV cache") as caught:
        num_blocks_on_cuda(memory, utilization, SHAPE)
    for part in (
        f"gpu_memory_utilization={utilization}",
        "total 80.00 GiB",
        f"free {memory.free // GIB}.00 GiB",
        "weights 16.00 GiB",
        "activations 4.00 GiB",
        "KV cache 0.00 GiB",
        "lower max_num_batched_tokens or max_num_seqs",
    ):
        assert part in str(caught.value)


def test_the_sum_is_logged_once_with_the_number_of_tokens(caplog):
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        num_blocks = num_blocks_on_cuda(ALONE, 0.4, SHAPE)
    (message,) = caplog.messages
    assert message.endswith(f"KV cache 9.00 GiB, {num_blocks * 64} tokens")


def test_room_is_kept_for_rows_that_ask_for_penalties():
    """512 rows of 151,936 counts are 300 MB, which a full cache once left no room for."""
    assert sampling_bytes(512, 151_936) >= 4 * 512 * 151_936 + 2**28


def test_a_cpu_gets_its_budget_and_no_more_than_can_be_used():
    assert num_blocks_on_cpu(1.0, SHAPE, num_useful_blocks=10**6) == 128
    assert num_blocks_on_cpu(1.0, SHAPE, num_useful_blocks=5) == 5
    with pytest.raises(ValueError, match="cpu_kvcache_space_gib=0.001 holds no block of 8388608"):
        num_blocks_on_cpu(0.001, SHAPE, num_useful_blocks=5)


def test_all_ranks_have_as_many_blocks_as_the_poorest(tiny_model):
    """Rank 0 once handed out blocks that another, with less memory free, did not have."""

    def num_blocks(parallel) -> tuple[int, int]:
        options: dict[str, Any] = {
            "device": "cpu",
            "cpu_kvcache_space_gib": 0.004 / (1 + parallel.tp_rank),
            "tensor_parallel_size": 2,
            "kvcache_block_size": 16,
        }
        runner = ModelRunner(
            Config.from_options(tiny_model, options),
            load_model_config(tiny_model),
            tiny_model,
            Placement(parallel, torch.device("cpu"), torch.float32),
            max_model_len=512,
        )
        told = runner.init_kv_cache()
        return told, runner._kv_cache.shape[2]

    block_bytes = KVCacheShape(2, 16, 1, 32, torch.float32).block_bytes
    expected = int(0.002 * GIB) // block_bytes
    assert on_ranks(2, num_blocks) == [(expected, expected)] * 2


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 12, 16, 17, 100, 255, 256, 257, 300, 512, 1000])
def test_graph_sizes_end_with_the_cap_and_waste_little(max_num_seqs):
    """Where the cap was no multiple of the steps, a full batch had no graph: StopIteration."""
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        padded = next(size for size in sizes if size >= num_rows)
        assert padded <= 2 * num_rows and padded - num_rows < 32


def pretend(monkeypatch, capability=(9, 0), num_gpus=2):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_bfloat16_on_a_gpu_without_it_is_refused_by_name(monkeypatch, name):
    pretend(monkeypatch, capability=(7, 5))
    with pytest.raises(ValueError, match="Tesla T4 has no bfloat16.*7.5.*Pass dtype='float16'"):
        resolve_dtype(name, torch.bfloat16, CUDA)
    assert resolve_dtype("float16", torch.bfloat16, CUDA) is torch.float16


def test_a_checkpoint_that_names_no_dtype_gets_the_devices(monkeypatch):
    pretend(monkeypatch)
    assert resolve_dtype("auto", None, CUDA) is torch.bfloat16
    assert resolve_dtype("auto", None, torch.device("cpu")) is torch.float32


def test_ranks_take_one_gpu_each(monkeypatch):
    pretend(monkeypatch)
    assert resolve_device("auto").index == 0
    assert [resolve_device("cuda", rank).index for rank in range(2)] == [0, 1]
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"GPU 2 does not exist: torch sees 2 GPU\(s\)"):
        resolve_device("cuda", 2)
    pretend(monkeypatch, num_gpus=0)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="needs a CUDA GPU.*Pass device='cpu'"):
        resolve_device("cuda")
