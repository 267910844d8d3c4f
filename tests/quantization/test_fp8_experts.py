"""Sparse layers with fp8 weights: whole models, their loading, and the kernels."""

from __future__ import annotations

from dataclasses import replace

import model_harness
import pytest
import torch
from fp8_checkpoints import (
    COMPRESSED_TENSORS_CONFIG,
    QWEN_CONFIG,
    RoundingOracle,
    load,
    quantized_weights,
    stack_experts,
    write_quantized,
)
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.models.model_config import load_model_config
from nanovllm.models.quantization_config import read_quantization
from nanovllm.moe.grouped_gemm import (
    Scales,
    TileConfig,
    config_for,
    down_reference,
    down_triton,
    gate_up_reference,
    gate_up_triton,
)
from nanovllm.moe.plan import make_plan_reference
from nanovllm.quantization.experts import Fp8Experts
from nanovllm.quantization.formats import with_quantization
from nanovllm.quantization.kernels.fp8_gemm import dequantize, dequantize_weight
from nanovllm.quantization.kernels.quantize import QuantTensor, quantize, quantize_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a CPU the finer one: a tolerance lets less through.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KINDS = ("online", "channel", "block")
each_kind = pytest.mark.parametrize("kind", KINDS)
# One layer, for the reason that test_fp8_models.py gives; whole blocks on two ranks too.
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 192, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(1))
CPU = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5 + i, *range(30, 60)] for i in range(3)] + [[7, 8]]
EXPERT = "model.layers.0.mlp.experts.3"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same model as "online" (plain), "channel" and "block", and another one plain."""
    root = tmp_path_factory.mktemp("fp8_experts")
    source = write_tiny(root / "online", "Qwen3MoeForCausalLM", **SIZES)
    other = write_tiny(root / "other", "Qwen3MoeForCausalLM", seed=1, **SIZES)
    kinds = {kind: write_quantized(source, root / kind, kind) for kind in KINDS[1:]}
    return {"online": source, "other": other, **kinds}


def experts_of(model):
    return model.model.layers[0].mlp.experts


def weights_of(experts):
    """What the two stacks of weights stand for, float32."""
    group_size = experts._format.group_size
    wide = [dequantize_weight(QuantTensor(*pair), group_size) for pair in experts.matrices()]
    half = len(wide) // 2
    return torch.stack(wide[:half]), torch.stack(wide[half:])


@each_kind
def test_logits_are_those_of_transformers_that_rounds(checkpoints, kind):
    expected = RoundingOracle(checkpoints["online"], kind).logits(IDS.tolist())
    ours = model_harness.prefill_logits(load(checkpoints[kind]), IDS)
    error = (ours - expected).abs().amax(dim=-1) / expected.std()
    # In a few positions a sum in another order rounds to the other side.
    assert error.median() < 1e-5 and (error < 1e-4).float().mean() >= 0.8, error
    assert error.max() < 0.1, error
    plain = model_harness.prefill_logits(model_harness.load(checkpoints["online"]), IDS)
    assert (plain - expected).abs().amax(dim=-1).median() > 0.01 * expected.std()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_weights_stand_for_what_the_checkpoint_says(checkpoints, kind):
    meant = quantized_weights(checkpoints["online"], kind)[1]
    model = load(checkpoints[kind])
    gate_up, down = weights_of(experts_of(model))
    for expert in range(SIZES["num_experts"]):
        gate, up, expected = (
            meant[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"]
            for part in ("gate", "up", "down")
        )
        assert torch.equal(gate_up[expert], torch.cat([gate, up]))
        assert torch.equal(down[expert], expected)
    router = model.model.layers[0].mlp.gate.weight
    assert torch.equal(router, meant["model.layers.0.mlp.gate.weight"])


@each_kind
def test_ranks_hold_parts_of_the_same_numbers(checkpoints, kind):
    gate_up, down = weights_of(experts_of(load(checkpoints[kind])))

    def run(parallel):
        model = load(checkpoints[kind], parallel=parallel)
        return weights_of(experts_of(model)), model_harness.prefill_logits(model, IDS)

    (ours_0, logits), (ours_1, same) = model_harness.on_ranks(2, run)
    halves = [ours[0].chunk(2, dim=1) for ours in (ours_0, ours_1)]
    parts = [halves[0][0], halves[1][0], halves[0][1], halves[1][1]]
    assert torch.equal(torch.cat(parts, dim=1), gate_up)
    assert torch.equal(torch.cat([ours_0[1], ours_1[1]], dim=2), down)
    assert torch.equal(logits, same)
    expected, unrounded = (
        model_harness.prefill_logits(model, IDS)
        for model in (load(checkpoints[kind]), model_harness.load(checkpoints["online"]))
    )
    # Ranks scale what they hold of an activation, so roundings differ; errors stay as large.
    error, usual = ((found - unrounded).abs().mean() for found in (logits, expected))
    assert error < 1.1 * usual


@each_kind
def test_engines_answer_alike_and_trainers_replace_experts(make_llm, checkpoints, kind):
    """New weights come in the model's dtype, before and after memory was lent."""

    def tokens(llm):
        return [out["token_ids"] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    llm = make_llm(checkpoints[kind], quantization="fp8", **CPU)
    settings = {**CPU, "num_kvcache_blocks": 12, "max_num_batched_tokens": 24}
    of_old = tokens(llm)
    assert tokens(make_llm(checkpoints[kind], quantization="fp8", **settings)) == of_old
    new = load_file(checkpoints["other"] / "model.safetensors")
    llm.load_weights(new.items())
    of_new = tokens(llm)
    assert of_new != of_old
    if kind == "online":
        assert tokens(make_llm(checkpoints["other"], quantization="fp8", **CPU)) == of_new
    llm.sleep(level=2)
    llm.wake_up()  # which reads the checkpoint again
    assert tokens(llm) == of_old
    llm.load_weights(new.items())
    assert tokens(llm) == of_new
    up = f"{EXPERT}.up_proj.weight"
    before = weights_of(experts_of(llm._engine._executor._runner._model))[0].clone()
    llm.load_weights([(up, new[up] * 0.5)])
    changed = (weights_of(experts_of(llm._engine._executor._runner._model))[0] != before).nonzero()
    assert set(changed[:, 0].tolist()) == {3} and int(changed[:, 1].min()) >= 256


def stacked(tensors):
    """The experts' weights as transformers 5 has them in memory."""
    tensors = {n: t for n, t in tensors.items() if ".experts." in n and n.endswith("weight")}
    stack_experts(tensors, "model.layers.0.mlp.experts", SIZES["num_experts"])
    return tensors


def test_a_trainers_stacked_experts_are_quantised(checkpoints):
    model, expected = load(checkpoints["online"]), load(checkpoints["other"])
    pairs = list(stacked(load_file(checkpoints["other"] / "model.safetensors")).items())
    model.check_weights(pairs)
    model.load_weights(pairs, partial=True)
    for ours, theirs in zip(
        weights_of(experts_of(model)), weights_of(experts_of(expected)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_scales_and_a_stack_that_is_not_fp8_are_no_checkpoint(checkpoints, tmp_path, kind):
    """The stack was quantised here, and its scales replaced by those of other numbers."""
    tensors = quantized_weights(checkpoints["online"], kind)[0]
    plain = stacked(load_file(checkpoints["online"] / "model.safetensors"))
    kept = {n: t for n, t in tensors.items() if ".experts." not in n or "scale" in n}
    (tmp_path / "config.json").write_bytes((checkpoints[kind] / "config.json").read_bytes())
    save_file({**kept, **plain}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts.\w+_proj is torch.float32, but quant"):
        load(tmp_path)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_stack_of_fp8_comes_with_a_scale_for_each_matrix(checkpoints, kind):
    tensors = quantized_weights(checkpoints["online"], kind)[0]
    scales = {n: t for n, t in tensors.items() if ".experts." in n and "scale" in n}
    pairs = [*stacked(tensors).items(), *scales.items()]
    model = load(checkpoints[kind])
    before = weights_of(experts_of(model))
    model.check_weights(pairs)
    model.load_weights(pairs, partial=True)
    assert all(map(torch.equal, weights_of(experts_of(model)), before))
    missing = r"experts.0.gate_proj.weight in .* without .*experts.0.gate_proj.weight_scale"
    with pytest.raises(ValueError, match=missing):
        model.check_weights(pairs[:2])


def test_scales_that_are_none_are_named_in_an_update(checkpoints):
    tensors = quantized_weights(checkpoints["online"], "channel")[0]
    weight, scale = f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale"
    pairs = [(weight, tensors[weight]), (scale, -tensors[scale])]
    with pytest.raises(ValueError, match=f"{scale}: 256 of 256 scales are negative"):
        load(checkpoints["channel"]).check_weights(pairs)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("channel", "down_proj.weight_scale", lambda t: t[:1], r"shape \(1, 1\) does not"),
        ("channel", "up_proj.weight_scale", lambda t: -t, "256 of 256 scales are neg"),
        ("channel", "up_proj.weight_scale", lambda t: None, "1 missing: .*3.up_proj.weight_s"),
        ("channel", "up_proj.weight", lambda t: t.float(), "is torch.float32, but quantiz"),
        ("channel", "gate_proj.weight", lambda t: t[1:], r"shape \(255, 192\) does not"),
        ("block", "up_proj.weight_scale_inv", lambda t: t.T[:1], r"shape \(1, 2\) does not"),
        ("block", "down_proj.weight_scale_inv", lambda t: t * float("nan"), "4 of 4 scales"),
        ("online", "down_proj.weight", lambda t: t / 0, "49152 values are NaN or"),
        ("online", "gate_proj.weight", lambda t: t.to(torch.float8_e4m3fn), "needs scales"),
        ("online", "up_proj.weight", lambda t: t[1:], r"shape \(255, 192\) does not"),
    ],
)
def test_faulty_tensors_are_named(checkpoints, tmp_path, kind, name, change, message):
    for path in checkpoints[kind].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = change(tensors.pop(f"{EXPERT}.{name}"))
    if tensor is not None:
        tensors[f"{EXPERT}.{name}"] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert f"{EXPERT}.{name}" in str(caught.value)


def test_ranks_may_not_cut_through_experts_blocks(checkpoints):
    model = load_model_config(checkpoints["block"])
    config = Config("m", tensor_parallel_size=4)
    model = replace(model, num_heads=8, num_kv_heads=8)
    with pytest.raises(ValueError, match="the experts' gate, up and down is 64 wide"):
        with_quantization(model, config, torch.device("cpu"))
    assert with_quantization(model, Config("m", tensor_parallel_size=2), torch.device("cpu"))


def test_routers_may_be_left_out_by_a_pattern():
    for ignored in (["lm_head", "re:.*mlp.gate$"], ["re:.*lm_head", "model.layers.0.mlp.gate"]):
        config = {**COMPRESSED_TENSORS_CONFIG, "ignore": ignored}
        assert read_quantization({"quantization_config": config}) == "fp8_channel"
    for left_out in ("re:.*up_proj$", "re:.*gate_proj.*", "model.layers.0.mlp.experts.0.up_proj"):
        config = {**COMPRESSED_TENSORS_CONFIG, "ignore": ["lm_head", left_out]}
        with pytest.raises(ValueError, match="unquantised, which is not supported"):
            read_quantization({"quantization_config": config})
    named = [f"model.layers.{i}.mlp.gate" for i in range(3)]
    config = {**QWEN_CONFIG, "modules_to_not_convert": ["lm_head", *named]}
    assert read_quantization({"quantization_config": config}) == "fp8_block"


# ---- kernels


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def quantized(weight, group_size):
    """Each expert's, with scales that differ from row to row and from block to block."""
    parts = [
        quantize(matrix, None) if group_size is None else quantize_blocks(matrix)
        for matrix in weight * torch.logspace(-2, 2, weight.shape[1], device=DEVICE)[:, None]
    ]
    return (torch.stack(column) for column in zip(*parts, strict=True))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    ("group_size", "hidden_size", "size"),
    [(None, 128, 64), (None, 192, 48), (128, 256, 128), (128, 192, 256)],
)
def test_products_equal_the_references(group_size, hidden_size, size, block_m):
    """Hidden sizes of 192 have a tail; rows past an expert's end are in every tile."""
    num_experts, num_tokens, top_k = 5, 33, 2
    tile = TileConfig(64, 128, 4, 2, group_m=3)
    expert_ids = randn(num_tokens, num_experts).argsort(dim=1)[:, :top_k].int().contiguous()
    pair_weights = torch.rand(num_tokens, top_k, device=DEVICE)
    plan = make_plan_reference(expert_ids, num_experts, block_m)
    x = quantize(randn(num_tokens, hidden_size, seed=1).to(DTYPE), group_size)
    weight, weight_scale = quantized(randn(num_experts, 2 * size, hidden_size) / 64, group_size)

    def wide(weight, scale):
        pairs = zip(weight, scale, strict=True)
        return torch.stack([dequantize_weight(QuantTensor(*pair), group_size) for pair in pairs])

    def close(ours, expected):
        assert ours.dtype is DTYPE and ours.isfinite().all()
        largest = expected.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(ours.float() / largest, expected / largest, rtol=0, atol=4e-3)

    scales = Scales(x.scale, weight_scale, group_size, DTYPE)
    activated = gate_up_triton(x.data, weight, plan, tile, scales)
    close(activated, gate_up_reference(dequantize(x, group_size), wide(weight, weight_scale), plan))
    rows = quantize(activated, group_size)
    weight, weight_scale = quantized(randn(num_experts, hidden_size, size) / 64, group_size)
    scales = Scales(rows.scale, weight_scale, group_size, DTYPE)
    shares = down_triton(rows.data, weight, plan, pair_weights, tile, scales)
    assert shares.shape == (top_k, num_tokens, hidden_size)
    full = wide(weight, weight_scale)
    close(shares, down_reference(dequantize(rows, group_size), full, plan, pair_weights))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@each_kind
def test_a_layer_of_kernels_equals_its_reference(checkpoints, monkeypatch, kind):
    """The whole way, with the cut that the batch's size asks for."""
    experts = experts_of(load(checkpoints[kind])).to(DEVICE)
    x = randn(21, SIZES["hidden_size"]).to(DTYPE)
    expert_ids = randn(21, 6, seed=2).argsort(dim=1)[:, :2].int().contiguous()
    pair_weights = torch.rand(21, 2, device=DEVICE)
    found = {}
    for is_on in (False, True):
        monkeypatch.setattr("nanovllm.quantization.experts.use_triton", lambda x, on=is_on: on)
        found[is_on] = experts(x, pair_weights, expert_ids).float()
    assert found[True].shape == (2, 21, SIZES["hidden_size"])
    # Activations between the products may round to their neighbours in e4m3.
    error = (found[True] - found[False]).abs().mean() / found[False].abs().mean()
    assert error < 0.01, error


def test_the_cut_follows_from_shapes():
    fp8 = torch.float8_e4m3fn
    rows = [config_for(n * 8, 128, fp8).block_m for n in (1, 128, 129, 256, 257, 1024, 1025, 8192)]
    assert rows == [16, 16, 32, 32, 64, 64, 128, 128]
    for n in (1, 1024, 65536):
        config = config_for(n, 128, fp8)
        for tile in (config.gate_up, config.down):  # what a Hopper's program may use at once
            num_bytes = tile.num_stages * (config.block_m + tile.block_n) * tile.block_k
            assert num_bytes <= 227 * 1024


def test_experts_take_half_the_memory(checkpoints):
    plain = model_harness.load(checkpoints["online"], dtype=torch.bfloat16)
    ours = load(checkpoints["online"], dtype=torch.bfloat16)
    assert isinstance(experts_of(ours), Fp8Experts)

    def num_bytes(module):
        return sum(p.numel() * p.element_size() for p in module.parameters())

    assert num_bytes(experts_of(ours)) < 0.52 * num_bytes(experts_of(plain))
