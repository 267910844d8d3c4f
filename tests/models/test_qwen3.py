"""Qwen3 against transformers: logits of one prefill."""

import pytest
import torch
from model_harness import build, load, on_ranks, prefill_logits
from tiny_models import make_tiny_qwen3, write_tiny_qwen3
from transformers import AutoModelForCausalLM

from nanovllm.models.model_config import load_model_config
from nanovllm.models.weights import free_storage, restore_storage
from nanovllm.utils.loader import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def oracle_logits(model_dir, input_ids, first_position=0, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    positions = torch.arange(first_position, first_position + len(input_ids))
    with torch.inference_mode():
        return model(input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0)).logits[0]


def some_ids(num_tokens=70, vocab_size=517):
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 80},
        {"rms_norm_eps": 1e-2, "num_hidden_layers": 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path, overrides):
    write_tiny_qwen3(tmp_path, **overrides)
    ids = some_ids()
    logits = prefill_logits(load(tmp_path), ids)
    torch.testing.assert_close(logits, oracle_logits(tmp_path, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rope_parameters",
    [
        LINEAR,
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    ],
    ids=str,
)
def test_declared_rope_scaling_is_applied_at_far_positions(tmp_path, rope_parameters):
    """Ignored scaling is exact at position 0 and drifts with length, so look far out."""
    write_tiny_qwen3(tmp_path, rope_parameters=rope_parameters)
    ids = some_ids()
    logits = prefill_logits(load(tmp_path), ids, first_position=400)
    expected = oracle_logits(tmp_path, ids, first_position=400)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_untied_head_is_kept(tmp_path):
    """An engine copied the embedding over an independent head."""
    write_tiny_qwen3(tmp_path, tie_word_embeddings=False)
    model = load(tmp_path)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head.data_ptr() != embedding.data_ptr()
    assert not torch.equal(head, embedding)


def test_tied_head_is_one_storage(tmp_path):
    write_tiny_qwen3(tmp_path, tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_the_truth_as_transformers(tmp_path, dtype):
    write_tiny_qwen3(tmp_path, dtype=dtype)
    assert load_model_config(tmp_path).dtype is dtype
    ids = some_ids()
    truth = oracle_logits(tmp_path, ids)
    ours = prefill_logits(load(tmp_path, dtype=dtype), ids).float()
    theirs = oracle_logits(tmp_path, ids, dtype=dtype).float()
    error, their_error = (ours - truth).abs().mean(), (theirs - truth).abs().mean()
    assert error < 1.5 * their_error + 1e-3, (error, their_error)


def test_weights_convert_to_the_asked_dtype(tmp_path):
    write_tiny_qwen3(tmp_path, dtype=torch.float32)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("tp_size", "overrides"),
    [
        (2, {}),
        (2, {"tie_word_embeddings": True, "attention_bias": True}),
        (4, {"num_key_value_heads": 2}),  # each kv head on two ranks
        (4, {"num_key_value_heads": 1, "attention_bias": True}),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 515}),
    ],
    ids=str,
)
def test_ranks_together_equal_one(tmp_path, tp_size, overrides):
    write_tiny_qwen3(tmp_path, **overrides)
    ids = some_ids(40, 515)
    expected = prefill_logits(load(tmp_path), ids)
    results = on_ranks(
        tp_size, lambda parallel: prefill_logits(load(tmp_path, parallel=parallel), ids)
    )
    for logits in results:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tp_size", "overrides", "message"),
    [
        (3, {}, "num_attention_heads = 4 .* tensor_parallel_size = 3"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "num_key_value_heads = 3 .* tensor_parallel_size = 4",
        ),
        (2, {"intermediate_size": 97}, "intermediate_size = 97 .* tensor_parallel_size = 2"),
    ],
    ids=str,
)
def test_uneven_split_names_both_numbers(tmp_path, tp_size, overrides, message):
    write_tiny_qwen3(tmp_path, **overrides)
    with pytest.raises(ValueError, match=message):
        on_ranks(tp_size, lambda parallel: build(load_model_config(tmp_path), parallel=parallel))


def test_dummy_weights_are_seeded_and_finite(tmp_path):
    write_tiny_qwen3(tmp_path)
    config = load_model_config(tmp_path)
    results = []
    for seed in (1, 1, 2):
        model = build(config)
        model.init_dummy_weights(seed)
        results.append(prefill_logits(model, some_ids(5)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert results[0].isfinite().all()


def test_freed_weights_come_back_without_what_their_memory_held(tmp_path):
    """The vocabulary, 517, leaves the second rank a row that no checkpoint fills."""
    write_tiny_qwen3(tmp_path)

    def padding_after_waking(parallel):
        model = build(load_model_config(tmp_path), parallel=parallel)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        free_storage(model)
        assert restore_storage(model)
        load_model(model, tmp_path)  # which refuses what is not finite
        return model.model.embed_tokens.weight[-1].tolist()

    last_row, padding = on_ranks(2, padding_after_waking)
    assert any(last_row)
    assert not any(padding)


def test_tiny_model_is_a_good_oracle():
    """Greedy tokens of the tests' model vary, and lead by more than float noise."""
    for tied in (False, True):
        model = make_tiny_qwen3(tie_word_embeddings=tied)
        out = model.generate(
            some_ids(8).unsqueeze(0),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        margins = best[:, 0] - best[:, 1]
        assert len(set(out.sequences[0, 8:].tolist())) >= 10
        assert margins.median() > 0.5
        assert margins.min() > 1e-3
