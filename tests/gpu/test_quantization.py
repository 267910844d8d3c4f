"""fp8 weights on CUDA: the demo model's sums, graphs and eager, and memory while loading."""

from __future__ import annotations

import json

import pytest
import torch
from quantization.fp8_checkpoints import CONFIGS, write_quantized
from tiny_models import write_tiny_qwen3

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs compute capability 8.9",
    ),
]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def sums(demo_model):
    pairs = json.loads((demo_model / "arithmetic_pairs.json").read_text())
    (name,) = set(pairs) - {"train"}
    return [(f"{a}{op}{b}=", str(a + b if op == "+" else a - b)) for a, op, b in pairs[name]]


@pytest.fixture(scope="module")
def checkpoints(demo_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    written = {kind: write_quantized(demo_model, root / kind, kind) for kind in CONFIGS}
    return {"online": demo_model, **written}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("online", {}),
        ("online", {"enforce_eager": True}),
        ("online", {"dtype": "float16"}),
        ("online", {"dtype": "float32"}),
        ("online", {"kv_cache_dtype": "fp8"}),
        ("channel", {}),
        ("block", {}),
        ("block", {"enforce_eager": True, "max_num_batched_tokens": 150, "max_num_seqs": 100}),
    ],
    ids=str,
)
def test_held_out_sums_are_right(checkpoints, sums, kind, options):
    quantization = "fp8" if kind == "online" else None
    with LLM(
        checkpoints[kind], quantization=quantization, num_kvcache_blocks=2048, **options
    ) as llm:
        outputs = llm.generate([prompt for prompt, _ in sums], GREEDY, use_tqdm=False)
        right = sum(out["text"] == answer for out, (_, answer) in zip(outputs, sums, strict=True))
        assert right >= 0.97 * len(sums)


def test_memory_lent_comes_back_as_it_was(checkpoints, sums):
    with LLM(checkpoints["online"], quantization="fp8", num_kvcache_blocks=512) as llm:
        prompts = [prompt for prompt, _ in sums[:50]]
        expected = [o["text"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        llm.sleep(2)
        llm.wake_up()
        assert [o["text"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """8 layers of 27 million parameters: 54 MB each in bfloat16, 27 in fp8."""
    return write_tiny_qwen3(
        tmp_path_factory.mktemp("wide") / "m", dtype=torch.bfloat16, num_hidden_layers=8,
        hidden_size=1024, head_dim=128, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=6144,
    )  # fmt: skip


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_device_never_holds_the_unquantised_model(wide_model, load_format):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with LLM(
        wide_model, quantization="fp8", load_format=load_format, kvcache_block_size=16,
        num_kvcache_blocks=16, max_num_batched_tokens=64, max_num_seqs=2, enforce_eager=True,
    ):  # fmt: skip
        peak = torch.cuda.max_memory_allocated() - before
    # One layer of eight in bfloat16 (all: 437 MB); cache, head and cuBLAS: below 100.
    assert 8 * 27e6 < peak < 8 * 27e6 + 54e6 + 100e6
