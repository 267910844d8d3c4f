"""Engines with fp8 weights: answers, ranks, trainers, memory lent, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from fp8_checkpoints import CONFIGS, write_quantized
from lora_adapters import merge_by_hand, write_adapter
from safetensors.torch import load_file
from tiny_models import write_tiny_qwen3

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.models.model_config import load_model_config
from nanovllm.quantization.formats import with_quantization
from nanovllm.quantization.linear import Fp8Linear

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5 + i, *range(30, 60)] for i in range(3)] + [[7, 8]]
CPU = {"device": "cpu", "kvcache_block_size": 16}


@pytest.fixture(scope="module")
def sums(demo_model):
    """(question, answer) of the 400 held-out sums."""
    keys = json.loads((demo_model / "arithmetic_pairs.json").read_text())
    (held_out,) = [pairs for name, pairs in keys.items() if name != "train"]
    return [(f"{a}{sign}{b}=", str({"+": a + b, "-": a - b}[sign])) for a, sign, b in held_out]


@pytest.fixture(scope="module")
def demo_checkpoints(demo_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    return {
        "online": demo_model,
        **{kind: write_quantized(demo_model, root / kind, kind) for kind in CONFIGS},
    }


def answers(llm, sums):
    outputs = llm.generate([question for question, _ in sums], GREEDY, use_tqdm=False)
    return [output["text"].strip() for output in outputs]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("online", {"dtype": "float32"}),
        ("online", {"dtype": "bfloat16", "enable_overlap": True}),
        ("channel", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("block", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_held_out_sums_come_out_right(make_llm, demo_checkpoints, sums, kind, options):
    """Of all 400 float32 gets 397 right, fp8 395; half of them are enough here."""
    sums = sums[::2]
    quantization = "fp8" if kind == "online" else None
    llm = make_llm(
        demo_checkpoints[kind], **CPU, max_num_seqs=256, quantization=quantization, **options
    )
    expected = [answer for _, answer in sums]
    right = sum(ours == answer for ours, answer in zip(answers(llm, sums), expected, strict=True))
    assert right >= 0.97 * len(sums)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 24, "max_num_batched_tokens": 100},  # chunks, waiting
        {"tensor_parallel_size": 2, "max_num_seqs": 64},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_engine_settings(make_llm, demo_model, sums, options):
    fp8 = {"dtype": "float32", "quantization": "fp8", **CPU}
    some = sums[:30]
    expected = answers(make_llm(demo_model, **fp8), some)
    assert answers(make_llm(demo_model, **fp8, **options), some) == expected


def test_the_option_may_be_given_for_a_checkpoint_in_fp8(make_llm, demo_checkpoints):
    llm = make_llm(
        demo_checkpoints["block"], **CPU, quantization="fp8", max_num_seqs=4, num_kvcache_blocks=64
    )
    assert llm._engine.model_config.quantization == "fp8_block"


# ---- trainers


SIZES = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 256}
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def tiny_checkpoints(tmp_path_factory):
    """{name: {kind: directory}} of two random models that differ in their weights."""
    root = tmp_path_factory.mktemp("tiny")
    found = {}
    for seed, name in enumerate(("old", "new")):
        source = write_tiny_qwen3(root / name, seed=seed, **SIZES)
        kinds = {kind: write_quantized(source, root / f"{name}-{kind}", kind) for kind in CONFIGS}
        found[name] = {"online": source, **kinds}
    return found


def tokens(llm):
    return [out["token_ids"] for out in llm.generate(PROMPTS, LONG, use_tqdm=False)]


def state_of(llm):
    model = llm._engine._executor._runner._model
    state = dict(model.named_parameters())
    state.update(model.named_buffers())
    return {name: tensor.float().clone() for name, tensor in state.items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["online", "channel", "block"])
def test_trainers_replace_weights_and_memory_is_lent(make_llm, tiny_checkpoints, kind):
    dtype = "float16" if kind == "channel" else "float32"
    options = {"dtype": dtype, "num_kvcache_blocks": 64, "quantization": "fp8", **CPU}
    old, new = (tiny_checkpoints[name][kind] for name in ("old", "new"))
    llm, other = make_llm(old, **options), make_llm(new, **options)
    of_old, of_new = tokens(llm), tokens(other)
    assert of_old != of_new
    before = state_of(llm)

    llm.load_weights(load_file(new / "model.safetensors").items())
    assert tokens(llm) == of_new and same(state_of(llm), state_of(other))

    # From a trainer that holds them in bfloat16: quantised here, whatever the checkpoint was.
    wide = load_file(tiny_checkpoints["old"]["online"] / "model.safetensors")
    transposed = {n: w.T.contiguous().T if w.dim() == 2 else w for n, w in wide.items()}
    llm.load_weights((name, tensor.bfloat16()) for name, tensor in transposed.items())
    down_proj = llm._engine._executor._runner._model.model.layers[0].mlp.down_proj
    expected = wide["model.layers.0.mlp.down_proj.weight"]
    error = (down_proj(torch.eye(256)).T.float() - expected).abs()
    assert (error <= expected.abs() * 2**-3 + expected.abs().max() * 2**-10).all()

    # Asleep, and awake as the checkpoint is.
    llm.sleep(2)
    model = llm._engine._executor._runner._model
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    llm.wake_up()
    assert tokens(llm) == of_old and same(state_of(llm), before)


@pytest.mark.parametrize("kind", ["online", "channel"])
def test_faulty_updates_change_nothing(make_llm, tiny_checkpoints, kind):
    llm = make_llm(
        tiny_checkpoints["old"][kind], **CPU, quantization="fp8", dtype="float32",
        num_kvcache_blocks=64,
    )  # fmt: skip
    new = load_file(tiny_checkpoints["new"]["channel"] / "model.safetensors")
    plain = load_file(tiny_checkpoints["new"]["online"] / "model.safetensors")
    weight, scale = (UP, new[UP]), (f"{UP}_scale", new[f"{UP}_scale"])
    bad = {
        "online": [
            ([weight], "needs scales"),
            ([weight, scale], f"1 unexpected: {UP}_scale"),
            ([(UP, plain[UP][1:])], "shape"),
            ([(UP, plain[UP].int())], "dtype torch.int32"),
        ],
        "channel": [
            ([weight], f"{UP} in torch.float8_e4m3fn comes without {UP}_scale"),
            ([scale], f"{UP}_scale comes without {UP} in torch.float8_e4m3fn"),
            ([(UP, plain[UP]), scale], f"{UP}_scale comes without"),
            ([weight, (scale[0], -scale[1])], "are negative, NaN or infinite"),
            ([weight, (scale[0], scale[1].T)], "shape"),
        ],
    }
    before = state_of(llm)
    norm = ("model.norm.weight", plain["model.norm.weight"])
    for pairs, message in bad[kind]:
        with pytest.raises(ValueError, match=message):
            llm.load_weights([norm, *pairs])
        assert same(state_of(llm), before)


@pytest.mark.parametrize("kind", ["online", "channel", "block"])
def test_random_weights_of_a_config_alone(make_llm, tiny_checkpoints, kind):
    llm = make_llm(
        tiny_checkpoints["old"][kind], **CPU, quantization="fp8", load_format="dummy", seed=3,
        num_kvcache_blocks=64,
    )  # fmt: skip
    tokens(llm)
    for module in llm._engine._executor._runner._model.modules():
        if isinstance(module, Fp8Linear):
            spread = module(torch.eye(module.weight.shape[1])).std()
            assert spread == pytest.approx(0.02, rel=0.1)


# ---- what is refused


def test_other_methods_are_no_choice(make_llm, demo_model):
    with pytest.raises(ValueError, match="quantization must be 'fp8', got 'awq'"):
        make_llm(demo_model, quantization="awq")
    with pytest.raises(TypeError, match="quantization must be 'fp8', got True"):
        make_llm(demo_model, quantization=True)


def test_a_gpu_without_fp8_is_named(demo_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    model, cuda = load_model_config(demo_model), torch.device("cuda")
    plain, fp8 = Config("m"), Config("m", quantization="fp8")
    assert with_quantization(model, plain, cuda) is model
    with pytest.raises(ValueError, match=r"A GPU has no fp8 .*capability 8.6, 8.9 is needed"):
        with_quantization(model, fp8, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert with_quantization(model, fp8, cuda).quantization == "fp8"


def test_an_adapter_is_merged_before_weights_are_rounded(make_llm, tiny_checkpoints, tmp_path):
    source = tiny_checkpoints["old"]["online"]
    adapter = write_adapter(tmp_path / "adapter", source)
    merged = merge_by_hand(tmp_path / "merged", source, adapter, {"weight": 6 / 4})
    options = {"dtype": "float32", "num_kvcache_blocks": 64, "quantization": "fp8", **CPU}
    ours, expected, without = (
        state_of(make_llm(directory, lora=lora, **options))
        for directory, lora in ((source, str(adapter)), (merged, None), (source, None))
    )
    name = "model.layers.1.mlp.down_proj.weight"
    assert (ours[name] == expected[name]).float().mean() > 0.999
    assert (ours[name] == without[name]).float().mean() < 0.5
    with pytest.raises(ValueError, match="lora cannot be merged into weights that the checkpoint"):
        make_llm(tiny_checkpoints["old"]["block"], lora=str(adapter), **options)


def test_ranks_may_not_cut_through_blocks(make_llm, demo_checkpoints):
    with pytest.raises(ValueError, match="q is 192 wide with tensor_parallel_size = 2, no multip"):
        make_llm(demo_checkpoints["block"], **CPU, tensor_parallel_size=2)
