"""LoRA adapters merged at load: the tokens of the merged checkpoint, or a refusal that says why."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from lora_adapters import ALL, CONFIG, PREFIX, WEIGHTS, merge_by_hand, write_adapter
from oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny, write_tiny_qwen3

from nanovllm import LLM, SamplingParams
from nanovllm.batch.fingerprint import job_fingerprint
from nanovllm.config import Config
from nanovllm.lora.adapter import check_adapter
from nanovllm.lora.merge import merged
from nanovllm.lora.settings import _names
from nanovllm.utils.loader import iterate_safetensors

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5 + i, *range(30, 60)] for i in range(3)] + [[7, 8]]
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64}
EXPERTS = {
    "Qwen3MoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
}
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_model):
    return write_adapter(tmp_path_factory.mktemp("lora") / "adapter", tiny_model)


@pytest.fixture(scope="module")
def merged_model(tmp_path_factory, tiny_model, adapter):
    return merge_by_hand(tmp_path_factory.mktemp("lora") / "m", tiny_model, adapter, {"": 6 / 4})


@pytest.fixture(scope="module")
def merged_oracle(merged_model):
    return Oracle(merged_model)


def tokens_of(llm):
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def check(llm, oracle):
    for prompt, tokens in zip(PROMPTS, tokens_of(llm), strict=True):
        oracle.check_greedy(prompt, tokens)


def weight_of(llm, name):
    return llm._engine._executor._runner._model.get_parameter(name)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("LlamaForCausalLM", ["q_proj", "down_proj", "lm_head"]),
        ("Qwen2ForCausalLM", ["v_proj", "o_proj", "gate_proj"]),
        ("Phi3ForCausalLM", ["qkv_proj", "gate_up_proj"]),
        ("Qwen3MoeForCausalLM", ["k_proj", "gate", "down_proj"]),  # with each expert's
    ],
)
def test_tokens_are_those_of_the_merged_checkpoint(tmp_path, make_llm, architecture, targets):
    model = write_tiny(tmp_path / "model", architecture, **EXPERTS.get(architecture, {}))
    adapter = write_adapter(tmp_path / "adapter", model, target_modules=targets)
    merged = merge_by_hand(tmp_path / "merged", model, adapter, {"": 6 / 4})
    llm = make_llm(model, lora=adapter, dtype="float32", **OPTIONS)
    check(llm, Oracle(merged))


@pytest.mark.parametrize(
    ("changes", "ranks", "scales"),
    [
        ({"use_rslora": True, "r": 9}, None, {"": 6 / math.sqrt(9)}),
        (
            {
                "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
                "alpha_pattern": {r"layers\.\d+\.self_attn\.[qk]_proj": 1.5, "_proj": 99},
            },
            {"q_proj": 2, "layers.1.mlp.up_proj": 8},
            {"q_proj": 1.5 / 2, "k_proj": 1.5 / 4, "layers.1.mlp.up_proj": 6 / 8, "": 6 / 4},
        ),
        (
            {"alpha_pattern": {"^model.layers.0.mlp.up_proj": 2, "o_proj": 0}, "use_rslora": True},
            None,
            {"layers.0.mlp.up_proj": 2 / math.sqrt(4), "o_proj": 0, "": 6 / math.sqrt(4)},
        ),
    ],
    ids=["rslora", "patterns", "patterns and rslora"],
)
def test_rank_and_scale_follow_the_settings(tmp_path, tiny_model, make_llm, changes, ranks, scales):
    adapter = write_adapter(tmp_path / "adapter", tiny_model, ranks=ranks, **changes)
    merged = merge_by_hand(tmp_path / "merged", tiny_model, adapter, scales)
    llm = make_llm(tiny_model, lora=str(adapter), dtype="float32", **OPTIONS)
    check(llm, Oracle(merged))


@pytest.mark.parametrize(
    ("pattern", "is_named"),
    [
        ("up_proj", True),
        ("mlp.up_proj", True),
        ("layers.(0|1).mlp.(up|down)_proj", True),
        ("up", False),
        ("p_proj", False),
        ("layers.0.mlp", False),
        ("mlp.up_proj|self_attn.q_proj", True),
    ],
)
def test_a_pattern_names_a_whole_module_by_its_end(pattern, is_named):
    assert _names(pattern, "model.layers.0.mlp.up_proj") == is_named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_rounded_once_to_the_models_dtype(tmp_path, make_llm, dtype):
    """Not in the base's dtype or the adapter's, which are bfloat16 here."""
    model = write_tiny_qwen3(tmp_path / "model", dtype=torch.bfloat16)
    adapter = write_adapter(tmp_path / "adapter", model, dtype=torch.bfloat16)
    llm = make_llm(model, lora=adapter, dtype=dtype, **OPTIONS)
    base, halves = load_file(model / "model.safetensors"), load_file(adapter / WEIGHTS)
    name = "model.layers.1.mlp.down_proj"
    a, b = (halves[f"{PREFIX}{name}.lora_{part}.weight"].float() for part in "AB")
    expected = (base[f"{name}.weight"].float() + 1.5 * (b @ a)).to(dtype)
    weight = weight_of(llm, f"{name}.weight")
    assert weight.dtype == dtype
    # The products may differ in float32's last bit; a second rounding would in many of half's.
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
    norm = weight_of(llm, "model.norm.weight")
    assert torch.equal(norm, base["model.norm.weight"].to(dtype))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_adapter_through_the_life_of_an_engine(
    tiny_llm, tiny_model, tiny_oracle, adapter, merged_model, merged_oracle, tp_size
):
    """One engine through all of it, since two processes take seconds to start."""
    llm = tiny_llm(lora=adapter, tensor_parallel_size=tp_size)
    check(llm, merged_oracle)

    llm.sleep(1)
    llm.wake_up()
    check(llm, merged_oracle)

    # New weights are whole ones: nothing is added to them, and the prefix cache forgets.
    llm.load_weights(load_file(tiny_model / "model.safetensors").items())
    check(llm, tiny_oracle)

    # The checkpoint is read again, and the adapter merged again.
    llm.sleep(2)
    llm.wake_up()
    check(llm, merged_oracle)


def test_the_adapter_changes_the_tokens(tiny_llm, adapter):
    """Or the tests above would say nothing."""
    assert tokens_of(tiny_llm()) != tokens_of(tiny_llm(lora=adapter))


def test_prefix_hashes_depend_on_the_adapter(tmp_path, tiny_llm, tiny_model, adapter):
    other = write_adapter(tmp_path / "other", tiny_model, seed=1)
    copy = shutil.copytree(adapter, tmp_path / "copy")
    hashes = {}
    for name, lora in {"none": None, "one": adapter, "other": other, "copy": copy}.items():
        llm = tiny_llm(lora=lora)
        tokens_of(llm)
        assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16
        hashes[name] = set(llm._engine.scheduler.blocks._index)
    assert hashes["one"] & hashes["copy"]  # prompts' blocks, whatever was answered
    assert not hashes["none"] & hashes["one"]
    assert not hashes["none"] & hashes["other"]
    assert not hashes["one"] & hashes["other"]


def test_a_job_belongs_to_its_adapter(tmp_path, tiny_model, adapter):
    def job(lora):
        return job_fingerprint(Config(str(tiny_model), lora=lora), {}, source="-", shard=(0, 1))

    copy = shutil.copytree(adapter, tmp_path / "copy")
    other = write_adapter(tmp_path / "other", tiny_model, seed=1)
    stronger = write_adapter(tmp_path / "stronger", tiny_model, lora_alpha=7)
    assert job(adapter) == job(copy)
    assert "lora" not in job(None)  # a job begun before there were adapters goes on
    digests = [job(path)["lora"] for path in (adapter, other, stronger)]
    whole = b"".join((adapter / name).read_bytes() for name in (CONFIG, WEIGHTS))
    assert len(set(digests)) == 3 and digests[0] == xxhash.xxh3_128(whole).hexdigest()


def test_another_base_is_a_warning(tmp_path, tiny_model, adapter, caplog):
    check_adapter(adapter, tiny_model, is_tied=False)
    assert not caplog.records
    for base, warns in [("org/other-7B", True), (f"org/{tiny_model.name}", False), (None, False)]:
        caplog.clear()
        path = write_adapter(tmp_path / "x", tiny_model, base_model_name_or_path=base)
        with caplog.at_level(logging.WARNING):
            check_adapter(path, tiny_model, is_tied=False)
        assert ("was trained on 'org/other-7B'" in caplog.text) == warns


def test_some_layers_only(tmp_path, tiny_model, make_llm):
    adapter = write_adapter(tmp_path / "adapter", tiny_model, layers_to_transform=[0])
    change(adapter, lambda t: [t.pop(name) for name in [*t] if "layers.1." in name])
    merged = merge_by_hand(tmp_path / "merged", tiny_model, adapter, {"": 6 / 4})
    check(make_llm(tiny_model, lora=adapter, dtype="float32", **OPTIONS), Oracle(merged))


def keep(adapter, is_kept):
    """Take the updates of all other modules out of an adapter."""
    change(adapter, lambda t: [t.pop(n) for n in [*t] if not is_kept(n.removeprefix(PREFIX))])


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        ({"target_modules": "all-linear"}, lambda name: True),
        ({"target_modules": "All-Linear", "exclude_modules": []}, lambda name: True),
        ({"layers_to_transform": 1}, lambda name: "layers.1." in name),
        (
            {"layers_to_transform": [0], "layers_pattern": "layers"},
            lambda name: "layers.0." in name,
        ),
        (
            {"layers_to_transform": [0], "target_modules": ["v_proj", f"{Q0[:-7]}.k_proj"]},
            lambda name: "layers.0.self_attn.v_proj" in name or "0.self_attn.k_proj" in name,
        ),
        ({"exclude_modules": ["self_attn.q_proj"]}, lambda name: "q_proj" not in name),
        ({"exclude_modules": ".*mlp.*"}, lambda name: "mlp" not in name),
        (
            {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
            lambda name: "o_proj" not in name,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "kept",
)
def test_parts_of_a_model_are_followed_to_the_tensor(tmp_path, tiny_model, settings, is_kept):
    """These settings once switched the check of what is missing or too many off."""
    config = dict(settings)
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    written = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(written | config))
    whole = load_file(adapter / WEIGHTS)
    keep(adapter, is_kept)
    check_adapter(adapter, tiny_model, is_tied=False)

    kept = {name for name in whole if is_kept(name.removeprefix(PREFIX))}
    lost = next(iter(kept)).rpartition(".lora_")[0]
    change(adapter, lambda t: [t.pop(f"{lost}.lora_{part}.weight") for part in "AB"])
    with pytest.raises(ValueError, match=f"but {lost.removeprefix(PREFIX)} have no update. Is the"):
        check_adapter(adapter, tiny_model, is_tied=False)

    if len(kept) == len(whole):
        head = {
            f"{PREFIX}lm_head.lora_A.weight": (4, 64),
            f"{PREFIX}lm_head.lora_B.weight": (517, 4),
        }
        foreign, extra = "lm_head", {name: torch.zeros(shape) for name, shape in head.items()}
    else:
        foreign = next(n for n in whole if n not in kept).rpartition(".lora_")[0]
        extra = {name: whole[name] for name in whole if name.startswith(f"{foreign}.lora")}
    save_file({name: whole[name].clone() for name in kept} | extra, adapter / WEIGHTS)
    with pytest.raises(ValueError, match=f"updates of {foreign.removeprefix(PREFIX)}, which adapt"):
        check_adapter(adapter, tiny_model, is_tied=False)


# ---- what is refused


def change(adapter, edit):
    """Change the tensors of an adapter in place."""
    tensors = load_file(adapter / WEIGHTS)
    edit(tensors)
    save_file(
        {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        },
        adapter / WEIGHTS,
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type must be 'CAUSAL_LM' or null, got 'SEQ_CLS'"),
        ({"bias": "lora_only"}, "bias must be 'none', got 'lora_only'"),
        ({"use_dora": True}, "use_dora = True is not supported. Merge it with PEFT's"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.weight"]}, "target_parameters"),
        ({"a_switch_of_2030": True}, "a_switch_of_2030 = True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'.* training has changed"),
        ({"r": 0}, "r must be at least 1, got 0"),
        ({"r": None}, "r must be an int"),
        ({"r": 5}, r"gives it rank 5, but lora_A is \(4, \d+\)"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a finite number"),
        ({"use_rslora": "yes"}, "use_rslora must be True or False"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] must be at least 1"),
        ({"rank_pattern": {"q_proj": 3}}, f"{Q0}: .*gives it rank 3, but lora_A"),
        ({"alpha_pattern": {"q_proj": "8"}}, r"alpha_pattern\['q_proj'\] must be a number"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has '\(', which is no regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, r"'\(\?i\)q_proj', which is no regular .*flags not"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"target_modules": ["c_attn"]}, "updates of .*q_proj.* which adapter_config.json does"),
        ({"target_modules": ".*c_attn"}, "updates of .*q_proj.* which adapter_config.json does"),
        ({"target_modules": [*ALL, 3]}, "target_modules must be a list of names or a regex"),
        ({"target_modules": ".*lm_head"}, r"'.*lm_head', but lm_head have no update"),
        ({"target_modules": None}, "target_modules is None, so whether the file is complete"),
        ({"target_modules": []}, r"target_modules is \[\], so whether"),
        ({"target_modules": ""}, "target_modules is '', so whether"),
        ({"target_modules": {"a": 1}}, "target_modules must be a list of names or a regex, got"),
        ({"exclude_modules": 5}, "exclude_modules must be a list of names or a regex, got 5"),
        ({"exclude_modules": "("}, r"exclude_modules has '\(', which is no regular expression"),
        ({"exclude_modules": list(ALL)}, "it has updates of .*q_proj.* which adapter_config.json"),
        ({"layers_to_transform": [2]}, "has 2, but the model's layers are 0 to 1"),
        ({"layers_to_transform": [0, -1]}, "layers_to_transform must be at least 0, got -1"),
        ({"layers_to_transform": True}, "layers_to_transform must be an int, got True"),
        ({"layers_to_transform": "0"}, "layers_to_transform must be an int, got '0'"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, r"has 0, but .* = \['h'\] finds no"),
        ({"layers_to_transform": [0], "layers_pattern": 7}, "layers_pattern must be a list of na"),
        ({"layers_to_transform": [0], "layers_pattern": ["("]}, r"layers_pattern has '\('"),
        ({"layers_pattern": "layers"}, "layers_pattern = 'layers' needs layers_to_transform"),
        (
            {"layers_to_transform": [0], "target_modules": "all-linear"},
            r"layers_to_transform = \[0\] goes with a list in target_modules, not with 'all",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_be_merged_are_named(tmp_path, tiny_model, changes, match):
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    config = json.loads((adapter / CONFIG).read_text()) | changes
    (adapter / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=match):
        check_adapter(adapter, tiny_model, is_tied=False)


def test_a_name_that_no_module_has_is_left_out_as_by_peft(tmp_path, tiny_model, caplog):
    """A usual list of names is longer than what one model has, and was refused for that."""
    adapter = write_adapter(tmp_path / "adapter", tiny_model, target_modules=[*ALL, "c_attn"])
    check_adapter(adapter, tiny_model, is_tied=False)
    assert "target_modules has 'c_attn', and the model has no such module" in caplog.text


A0, B0 = (f"{PREFIX}{Q0}.lora_{part}.weight" for part in "AB")
TABLE = torch.zeros(517, 64)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop(A0), f"{Q0}: lora_A is missing"),
        (lambda t: t.pop(B0), f"{Q0}: lora_B is missing"),
        (lambda t: (t.pop(A0), t.pop(B0)), f"target_modules has 'q_proj', but {Q0} have no update"),
        (lambda t: t.clear(), "has no tensors"),
        (lambda t: t.update({A0: t[A0][0]}), r"lora_A must be a matrix, got \(64,\)"),
        (lambda t: t.update({A0: t[A0][:, :32]}), r"update of .* is \(128, 32\), .* \(128, 64\)"),
        (lambda t: t.update({B0: t[B0][:, :3]}), r"rank 4, but .* lora_B \(128, 3\)"),
        (lambda t: t.update({A0: t[A0].to(torch.int8)}), "dtype torch.int8 is not supported"),
        (
            lambda t: t.update({f"{PREFIX}model.embed_tokens.weight": TABLE}),
            "1 tensors that are no lora_A or lora_B .*embed_tokens.weight. Embeddings",
        ),
        (
            lambda t: t.update({f"{PREFIX}lm_head.base_layer.weight": TABLE}),
            "1 tensors .*lm_head.base_layer.weight. They are copies .*save_embedding_layers=False",
        ),
        (
            lambda t: t.update({f"{PREFIX}{Q0}.lora_magnitude_vector": torch.ones(128)}),
            "lora_magnitude_vector",
        ),
        (
            lambda t: t.update({f"{PREFIX}{Q0}.lora_B.bias": torch.ones(128)}),
            "lora_B.bias",
        ),
        (
            lambda t: t.update({A0.replace("s.0", "s.7"): t[A0], B0.replace("s.0", "s.7"): t[B0]}),
            "the model has no model.layers.7.self_attn.q_proj.weight",
        ),
    ],
    ids=range(13),
)
def test_tensors_that_do_not_fit_are_named(tmp_path, tiny_model, edit, match):
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    change(adapter, edit)
    with pytest.raises(ValueError, match=match) as raised:
        check_adapter(adapter, tiny_model, is_tied=False)
    assert str(adapter) in str(raised.value)


def test_the_embedding_is_refused_by_name(tmp_path, tiny_model):
    adapter = write_adapter(tmp_path / "adapter", tiny_model, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="changes model.embed_tokens.weight; a LoRA on an embed"):
        check_adapter(adapter, tiny_model, is_tied=False)


def test_a_head_that_is_the_embedding_is_refused(tmp_path, tiny_model):
    adapter = write_adapter(tmp_path / "adapter", tiny_model, target_modules=["lm_head"])
    check_adapter(adapter, tiny_model, is_tied=False)
    with pytest.raises(ValueError, match="shares with its embedding"):
        check_adapter(adapter, tiny_model, is_tied=True)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda d: shutil.rmtree(d), "is not a directory. It must be a local one with"),
        (lambda d: (d / CONFIG).unlink(), f"lacks {CONFIG}; it has {WEIGHTS}"),
        (lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"), f"lacks {WEIGHTS}.* Pickle"),
        (lambda d: (d / CONFIG).write_text("{"), f"{CONFIG} is not valid JSON"),
        (lambda d: (d / CONFIG).write_bytes(b"\xff"), f"{CONFIG} is not valid JSON"),
        (lambda d: (d / CONFIG).write_text("[]"), "must hold a JSON object, got list"),
        (lambda d: (d / WEIGHTS).write_bytes(b"\1" * 99), f"{WEIGHTS} is not a readable safete"),
    ],
    ids=range(7),
)
def test_broken_directories_are_refused_before_the_model_loads(
    tmp_path, tiny_model, caplog, spoil, match
):
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    spoil(adapter)
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=match):
        LLM(tiny_model, lora=adapter, **OPTIONS)
    assert "Loaded" not in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lora": 3}, TypeError, "lora must be a directory with adapter_config.json, got 3"),
        ({"lora": ""}, ValueError, "lora must be a directory with adapter_config.json, got ''"),
        ({"lora": "x", "load_format": "dummy"}, ValueError, "lora needs the weights that it was"),
    ],
)
def test_bad_options_are_named(options, error, match):
    with pytest.raises(error, match=match):
        Config("model", **options)


# ---- where PEFT is installed


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
        {"r": 4, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
        {
            "r": 8,
            "target_modules": r".*\.(q|v|down)_proj",
            "rank_pattern": {"down_proj": 2, r".*1\.self_attn\.q_proj": 16},
            "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 32, "v_proj": 5},
        },
        {"r": 4, "target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
        {
            "r": 4,
            "target_modules": ["k_proj", "model.layers.1.mlp.up_proj"],
            "layers_to_transform": 0,
            "layers_pattern": ["h", "layers"],
        },
        {"r": 4, "target_modules": "all-linear", "exclude_modules": ["mlp.up_proj", "k_proj"]},
        {"r": 4, "target_modules": list(ALL), "exclude_modules": r".*\.1\..*"},
    ],
    ids=str,
)
def test_the_weights_are_those_that_peft_merges(tmp_path, tiny_model, fields):
    peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    adapter = Path(tmp_path / "adapter")
    model.save_pretrained(adapter, save_embedding_layers=False)
    expected = model.merge_and_unload().state_dict()
    check_adapter(adapter, tiny_model, is_tied=False)
    names = set()
    for name, tensor in merged(iterate_safetensors(tiny_model), adapter, torch.device("cpu")):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
        names.add(name)
    assert names == set(expected)
