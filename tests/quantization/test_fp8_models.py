"""Whole models with fp8 weights against transformers that rounds as fp8 does."""

from __future__ import annotations

from dataclasses import replace

import model_harness
import pytest
import torch
from fp8_checkpoints import RoundingOracle, load, quantized_weights, write_quantized
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny, write_tiny_qwen3

from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.placement import Placement
from nanovllm.models.model_config import load_model_config
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.quantization.formats import FORMATS
from nanovllm.quantization.kernels.fp8_gemm import dequantize_weight
from nanovllm.quantization.linear import Fp8Linear
from nanovllm.quantization.model import Fp8MLP, Fp8RMSNorm, quantized_class
from nanovllm.utils.parallel import ParallelContext

# On two ranks too projections are whole blocks; hidden_size is not. One layer: where a sum in
# another order takes a rounding to the other side, a second would carry it to all positions.
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 192,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
}
IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(1))
MODELS = {
    "Qwen3ForCausalLM": {},
    "Qwen2ForCausalLM": {"hidden_size": 256},  # which has a bias
    "LlamaForCausalLM": {"attention_bias": True, "hidden_size": 256},  # o_proj has one too
    "MistralForCausalLM": {"sliding_window": None},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One plain checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("plain")
    return {
        name: write_tiny(root / name, name, **{**SIZES, **fields})
        for name, fields in MODELS.items()
    }


@pytest.fixture(scope="module")
def checkpoints(plain, tmp_path_factory):
    """The Qwen3 as "online" (plain), "channel" and "block"."""
    source, root = plain["Qwen3ForCausalLM"], tmp_path_factory.mktemp("fp8")
    return {
        "online": source,
        **{kind: write_quantized(source, root / kind, kind) for kind in ("channel", "block")},
    }


def assert_close(ours, expected):
    """Equal, but for the few positions where a rounding went to the other side."""
    error = (ours - expected).abs().amax(dim=-1) / expected.std()
    assert error.median() < 1e-5, error
    assert (error < 1e-4).float().mean() >= 0.8, error
    assert error.max() < 0.1, error


@pytest.mark.parametrize("kind", ["online", "channel", "block"])
def test_logits_are_those_of_transformers_that_rounds(plain, checkpoints, kind):
    expected = RoundingOracle(plain["Qwen3ForCausalLM"], kind).logits(IDS.tolist())
    model = load(checkpoints[kind])
    assert_close(model_harness.prefill_logits(model, IDS), expected)
    plain_model = model_harness.load(plain["Qwen3ForCausalLM"])
    unrounded = model_harness.prefill_logits(plain_model, IDS)
    assert (unrounded - expected).abs().amax(dim=-1).median() > 0.01 * expected.std()


@pytest.mark.parametrize("architecture", list(MODELS)[1:])
def test_every_dense_architecture_is_quantised(plain, architecture):
    expected = RoundingOracle(plain[architecture], "online").logits(IDS.tolist())
    assert_close(model_harness.prefill_logits(load(plain[architecture]), IDS), expected)


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_weights_stand_for_what_the_checkpoint_says(plain, checkpoints, kind):
    """Data and scales are kept as they are: to the last bit."""
    meant = quantized_weights(plain["Qwen3ForCausalLM"], kind)[1]
    layer = load(checkpoints[kind]).model.layers[0]
    prefix = "model.layers.0."
    for linear, names in {
        layer.self_attn.qkv_proj: [f"self_attn.{part}_proj" for part in "qkv"],
        layer.self_attn.o_proj: ["self_attn.o_proj"],
        layer.mlp.gate_up_proj: ["mlp.gate_proj", "mlp.up_proj"],
        layer.mlp.down_proj: ["mlp.down_proj"],
    }.items():
        expected = torch.cat([meant[f"{prefix}{name}.weight"] for name in names])
        ours = dequantize_weight(linear._quantized_weight, 128 if kind == "block" else None)
        assert torch.equal(ours, expected)


def test_nothing_but_the_layers_is_quantised_and_it_halves_them(plain):
    model = load(plain["Qwen3ForCausalLM"], dtype=torch.bfloat16)
    for layer in model.model.layers:
        kinds = [type(module) for module in layer.modules()]
        assert kinds.count(Fp8Linear) == 4
        assert kinds.count(Fp8RMSNorm) == 2 and kinds.count(Fp8MLP) == 1
    for name, parameter in model.named_parameters():
        is_fp8 = name.endswith("_proj.weight")
        assert parameter.dtype is (torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
    assert type(model.model.norm) is not Fp8RMSNorm


@pytest.mark.parametrize("kind", ["online", "channel", "block"])
def test_ranks_hold_parts_of_the_same_numbers(checkpoints, kind):
    """A row's scale is that of the whole row, though a rank sees a part of it."""
    whole = load(checkpoints[kind])

    def run(parallel):
        model = load(checkpoints[kind], parallel=parallel)
        return model, model_harness.prefill_logits(model, IDS)

    (model_0, ours), (model_1, same) = model_harness.on_ranks(2, run)
    group_size = 128 if kind == "block" else None
    for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj"):
        parts = [
            dequantize_weight(
                model.model.layers[0].get_submodule(name)._quantized_weight, group_size
            )
            for model in (model_0, model_1)
        ]
        full = dequantize_weight(
            whole.model.layers[0].get_submodule(name)._quantized_weight, group_size
        )
        if name == "mlp.gate_up_proj":
            halves = [part.chunk(2) for part in parts]
            parts = [halves[0][0], halves[1][0], halves[0][1], halves[1][1]]
        assert torch.equal(torch.cat(parts, dim=0 if len(parts) == 4 else 1), full)
    assert torch.equal(ours, same)
    expected = model_harness.prefill_logits(whole, IDS)
    if kind == "block":
        assert_close(ours, expected)
    else:  # each rank has its own scales for its part of the activations that it sums over
        unrounded = model_harness.prefill_logits(model_harness.load(checkpoints["online"]), IDS)
        error, usual = ((logits - unrounded).abs().mean() for logits in (ours, expected))
        assert error < 1.1 * usual


def test_a_bias_of_split_rows_enters_the_sum_once():
    bias = torch.arange(192.0)

    def run(parallel):
        place = Placement(parallel, torch.device("cpu"), torch.float32)
        linear = RowParallelLinear(256, 192, place, bias=True)
        fp8 = Fp8Linear(linear, FORMATS["fp8"], parallel)
        fp8.load_weight("weight", torch.zeros(192, 256))
        fp8.load_weight("bias", bias)
        return fp8(torch.ones(3, 128))

    for out in model_harness.on_ranks(2, run):
        assert torch.equal(out, bias.expand(3, -1))


def test_tied_embeddings_and_half_precision_checkpoints(tmp_path):
    directory = write_tiny_qwen3(
        tmp_path / "m", tie_word_embeddings=True, dtype=torch.float16, **SIZES
    )
    model = load(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_close(
        model_harness.prefill_logits(model, IDS),
        RoundingOracle(directory, "online").logits(IDS.tolist()),
    )


def test_layers_of_other_kinds_are_refused(plain):
    class Other(Qwen3ForCausalLM):
        def make_mlp(self, config, place, layer_id):
            return torch.nn.Identity()

    config = replace(load_model_config(plain["Qwen3ForCausalLM"]), quantization="fp8")
    place = Placement(ParallelContext.single(), model_harness.CPU, torch.float32)
    with pytest.raises(ValueError, match="SparseMLP; SelfAttention and Identity cannot"):
        quantized_class(Other)(config, place, None, max_model_len=64)


def damaged(directory, target, **changes):
    """Copy a checkpoint with tensors replaced, or, where the new one is None, left out."""
    target.mkdir()
    for path in directory.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    for name, change in changes.items():
        full = f"model.layers.0.{name.replace('__', '.')}"
        tensor = change(tensors.pop(full))
        if tensor is not None:
            tensors[full] = tensor.contiguous()
    save_file(tensors, target / "model.safetensors")
    return target


def with_nan(tensor):
    """The last value becomes a NaN; quantised by a kernel it would be the number -448."""
    bits = tensor.view(torch.uint8).clone()
    bits[-1, -tensor.itemsize :] = 0xFF
    return bits.view(tensor.dtype)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("channel", "mlp__down_proj__weight_scale", lambda t: t[:, 0], r"shape \(192,\) does not"),
        ("channel", "mlp__down_proj__weight_scale", lambda t: t[:1], r"shape \(1, 1\) does not"),
        ("channel", "mlp__up_proj__weight_scale", lambda t: t.T, r"shape \(1, 256\) does not"),
        ("channel", "mlp__up_proj__weight_scale", lambda t: -t, "256 of 256 scales are neg"),
        ("channel", "mlp__up_proj__weight_scale", lambda t: t / 0, "256 of 256 scales are neg"),
        ("channel", "mlp__up_proj__weight_scale", lambda t: t * 0, "256 of 256 scales .*all are 0"),
        ("channel", "mlp__up_proj__weight_scale", lambda t: t.int(), "dtype torch.int32"),
        ("channel", "mlp__up_proj__weight_scale", lambda t: None, "1 missing: .*up_proj.weight_s"),
        ("channel", "mlp__up_proj__weight", lambda t: t.float(), "is torch.float32, but quantiz"),
        ("channel", "mlp__up_proj__weight", lambda t: t.view(torch.uint8), "is torch.uint8, but"),
        ("channel", "mlp__up_proj__weight", lambda t: t[1:], r"shape \(255, 192\) does not"),
        ("channel", "input_layernorm__weight", lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3"),
        ("block", "mlp__up_proj__weight_scale_inv", lambda t: t.T[:1], r"shape \(1, 2\) does not"),
        ("block", "mlp__down_proj__weight_scale_inv", lambda t: t[:1], r"shape \(1, 2\) does not"),
        ("block", "self_attn__q_proj__weight_scale_inv", lambda t: t * float("nan"), "4 of 4 sc"),
        ("block", "self_attn__q_proj__weight", with_nan, "1 of its 49152 values are NaN"),
        ("channel", "mlp__down_proj__weight", with_nan, "1 of its 49152 values are NaN"),
        ("online", "mlp__down_proj__weight", with_nan, "1 of its 49152 values are NaN"),
        ("online", "self_attn__k_proj__weight", lambda t: t / 0, "49152 values are NaN or"),
        ("online", "self_attn__o_proj__weight", lambda t: t.double() * 1e40, "beyond float32's"),
        ("online", "mlp__up_proj__weight", lambda t: t.to(torch.float8_e4m3fn), "needs scales"),
        ("online", "mlp__up_proj__weight", lambda t: t.int(), "dtype torch.int32"),
        ("online", "mlp__up_proj__weight", lambda t: t[1:], r"shape \(255, 192\) does not"),
    ],
)  # fmt: skip
def test_faulty_tensors_are_named(checkpoints, tmp_path, kind, name, change, message):
    directory = damaged(checkpoints[kind], tmp_path / "m", **{name: change})
    with pytest.raises(ValueError, match=message) as caught:
        load(directory)
    assert name.replace("__", ".") in str(caught.value)


def test_rows_without_a_weight_may_have_scales_of_0(checkpoints, tmp_path):
    change = {"mlp__down_proj__weight_scale": lambda t: t * (t > t[9])}
    directory = damaged(checkpoints["channel"], tmp_path / "m", **change)
    linear = load(directory).model.layers[0].mlp.down_proj
    weight = dequantize_weight(linear._quantized_weight, None)
    assert 0 < int((weight == 0).all(dim=1).sum()) < len(weight)


def test_float16_overflows_quantised_or_not(checkpoints, tmp_path):
    """The weights fit e4m3 with a scale of their own, but are no weights of a float16 model."""
    change = {"mlp__up_proj__weight": lambda t: t * 1e7}
    directory = damaged(checkpoints["online"], tmp_path / "m", **change)
    load(directory)
    with pytest.raises(ValueError, match="mlp.up_proj.weight: its values reach .*beyond float16's"):
        load(directory, dtype=torch.float16)


def test_an_untold_fp8_checkpoint_is_refused(checkpoints, tmp_path):
    """Without quantization_config nothing says what its numbers mean."""
    target = damaged(checkpoints["channel"], tmp_path / "m")
    (target / "config.json").write_bytes((checkpoints["online"] / "config.json").read_bytes())
    with pytest.raises(ValueError, match="float8_e4m3fn is not supported"):
        model_harness.load(target)
