"""The fused layers against the ordinary ones: the same numbers, where they fit."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from model_harness import build
from tiny_models import write_tiny, write_tiny_qwen3

from nanovllm.fused import FusedLayers, fits
from nanovllm.fused.tiles import Tiles, gate_up_tiles
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.models.decoder import run_layers
from nanovllm.models.model_config import load_model_config
from nanovllm.utils.context import ForwardContext
from nanovllm.utils.loader import load_model

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FITTING = {
    "hidden_size": 512,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 1024,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model in bfloat16 and in float32."""
    directory = write_tiny_qwen3(tmp_path_factory.mktemp("fused") / "model", **FITTING)
    config = load_model_config(directory)
    both = []
    for dtype in (torch.bfloat16, torch.float32):
        model = build(config, dtype=dtype)
        load_model(model, directory)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a weight that is forgotten
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.copy_((0.5 + noise).to(torch.bfloat16))
        both.append(model.model.to(DEVICE))
    return both


def decode_context(num_rows, dtype):
    """Rows of 1 to 16 tokens, of which those before the last are noise; the last row is padding."""
    generator = torch.Generator().manual_seed(num_rows)
    seq_lens = (1 + torch.arange(num_rows) % 16).int()
    slots = torch.arange(num_rows) * 16 + seq_lens - 1
    if num_rows > 1:
        seq_lens[-1], slots[-1] = 0, -1
    cache = torch.randn(2, 2, num_rows, 16, 1, 128, generator=generator).to(torch.bfloat16)
    return ForwardContext(
        kv_cache=cache.to(DEVICE, dtype),
        is_decode=True,
        slot_mapping=slots.to(DEVICE),
        block_tables=torch.arange(num_rows, dtype=torch.int32, device=DEVICE)[:, None],
        seq_lens=seq_lens.to(DEVICE),
    )


@torch.inference_mode()
def run(layers, model, num_rows):
    ctx = decode_context(num_rows, model.norm.weight.dtype)
    input_ids = (torch.arange(num_rows, device=DEVICE) * 37) % 500
    hidden = layers(model, input_ids, ctx.seq_lens.clamp(min=1) - 1, ctx)
    num_live = max(1, num_rows - 1)
    return hidden[:num_live].float(), ctx.kv_cache.float()


@pytest.fixture
def few_programs(monkeypatch):
    """In the interpreter a program takes 15 ms, whatever it does."""
    if DEVICE.type == "cpu":
        wide = Tiles(64, 128, 4, 3, 64)
        monkeypatch.setattr(
            "nanovllm.fused.gate_up_silu.gate_up_tiles",
            lambda num_rows: gate_up_tiles(num_rows) if num_rows <= 16 else wide,
        )


@pytest.mark.parametrize(
    "num_rows", [16, 20, 260] if DEVICE.type == "cpu" else [1, 16, 20, 64, 256, 300]
)
@pytest.mark.usefixtures("few_programs")
def test_fused_layers_are_as_near_to_float32_as_ordinary_ones(models, num_rows):
    in_bfloat16, in_float32 = models
    fused = FusedLayers(DEVICE, has_five=True)
    exact = run(run_layers, in_float32, num_rows)
    ordinary = run(run_layers, in_bfloat16, num_rows)
    ours = run(fused, in_bfloat16, num_rows)
    for mine, theirs, right in zip(ours, ordinary, exact, strict=True):
        assert (mine - right).abs().mean() <= 1.1 * (theirs - right).abs().mean() + 1e-6
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.15)
    if num_rows == 16:
        for again, mine in zip(run(fused, in_bfloat16, num_rows), ours, strict=True):
            assert torch.equal(again, mine), "a step leaves nothing behind for the next"


@pytest.mark.parametrize(
    ("num_rows", "options", "expected"),
    [
        (16, {}, {"add": 4, "qkv": 2, "gate_up": 2}),  # of two layers
        (17, {}, {"qkv": 2, "gate_up": 2}),
        (257, {}, {"qkv": 2}),
        (512, {"has_five": False}, {"qkv": 2}),
        (513, {}, {"ordinary": 1}),
        (16, {"is_decode": False}, {"ordinary": 1}),
        (17, {"has_five": False}, {"qkv": 2, "gate_up": 2}),
        (16, {"has_five": False}, {"ordinary": 1}),  # float16, or one rank of several
    ],
    ids=str,
)
def test_the_number_of_rows_decides_which_kernels_run(
    models, monkeypatch, num_rows, options, expected
):
    model, _ = models
    ran = Counter()

    def note(name, result):
        ran[name] += 1
        return result

    x, wide = torch.zeros(2, num_rows, 512, dtype=torch.bfloat16, device=DEVICE)
    q = wide.view(num_rows, 4, 128)
    squares = torch.ones(num_rows, 8, device=DEVICE)
    heads = torch.zeros(num_rows, 1024, dtype=torch.bfloat16, device=DEVICE)
    for name, result in {
        "gemm_add_triton": ("add", (x, squares)),
        "qkv_rope_store_triton": ("qkv", q),
        "gate_up_silu_triton": ("gate_up", heads),
        "run_layers": ("ordinary", x),
    }.items():
        monkeypatch.setattr(f"nanovllm.fused.{name}", lambda *a, r=result, **b: note(*r))
    for layer in model.layers:
        monkeypatch.setattr(layer.self_attn.backend, "forward", lambda q, *others: q)
    fused = FusedLayers(DEVICE, has_five=options.get("has_five", True))
    ctx = replace(
        decode_context(num_rows, torch.bfloat16), is_decode=options.get("is_decode", True)
    )
    ids = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    assert fused(model, ids, ids, ctx).shape == (num_rows, 512)
    assert ran == expected


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ({"head_dim": 64, "num_attention_heads": 8}, torch.bfloat16),
        ({"hidden_size": 896}, torch.bfloat16),
        ({"hidden_size": 1536}, torch.bfloat16),
        ({"intermediate_size": 768}, torch.bfloat16),
        ({"num_attention_heads": 6}, torch.bfloat16),
        ({"attention_bias": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
    ids=str,
)
def test_other_layers_stay_as_they_are(tmp_path, overrides, dtype):
    directory = write_tiny_qwen3(tmp_path, **FITTING | overrides)
    model = build(load_model_config(directory), dtype=dtype)
    assert not any(fits(layer) for layer in model.model.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dense_layers_of_16_bits_fit(tmp_path, dtype):
    model = build(load_model_config(write_tiny_qwen3(tmp_path, **FITTING)), dtype=dtype)
    assert all(fits(layer) for layer in model.model.layers)


def test_quantised_and_sparse_layers_stay_as_they_are(tmp_path):
    fp8 = build(
        replace(load_model_config(write_tiny_qwen3(tmp_path, **FITTING)), quantization="fp8"),
        dtype=torch.bfloat16,
    )
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sparse_dir = write_tiny(tmp_path / "moe", "Qwen3MoeForCausalLM", **FITTING | sizes)
    sparse = build(load_model_config(sparse_dir), dtype=torch.bfloat16)
    for model in (fp8, sparse):
        assert not any(fits(layer) for layer in model.model.layers)
