"""A KV cache in fp8: the same answers under every setting, near those of an exact cache."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from test_demo_model import share_right, sums  # noqa: F401  # a fixture
from test_generate import make_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.kv_cache import KVCacheShape
from nanovllm.frontend.start_up import check_kv_cache

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = make_prompts()
V_PROJ = "model.layers.1.self_attn.v_proj.weight"


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def scales_of(llm: LLM) -> torch.Tensor:
    """[num_layers, 2, num_kv_heads]"""
    return llm._engine._executor._runner._kv_scales


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Tokens with a cache in fp8, each prompt by itself in one step."""
    options = {"device": "cpu", "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(tiny_model, kv_cache_dtype="fp8", **options) as llm:
        return tokens_of(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8_e4m3", "enable_overlap": True, "max_model_len": 90},
        {"max_num_batched_tokens": 7},
        {"num_kvcache_blocks": 12, "enable_overlap": True, "max_num_batched_tokens": 9},
        {"kvcache_block_size": 64, "num_kvcache_blocks": 8},
        {"tensor_parallel_size": 2, "num_kvcache_blocks": 12},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_engine_settings(tiny_llm, expected, options, optimistic):
    """What is attended to is always what the cache holds: never a fresh, unrounded K or V."""
    llm = tiny_llm(**{"kv_cache_dtype": "fp8", **options})
    for _ in range(2):  # the second time the prefix cache is warm
        assert tokens_of(llm) == expected
    is_tight, is_large = "num_kvcache_blocks" in options, "kvcache_block_size" in options
    assert (llm.metrics.num_preemptions > 0) == is_tight
    assert llm.metrics.num_cached_tokens > 0 or is_large  # a prompt fills no block of 64


def test_logprobs_are_near_those_of_an_exact_cache(tiny_llm):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    results = []
    for dtype in ("auto", "fp8"):
        outputs = tiny_llm(kv_cache_dtype=dtype).generate(PROMPTS, params, use_tqdm=False)
        results.append(
            torch.tensor(
                [
                    place[token_id].logprob
                    for output in outputs
                    for token_id, place in zip(
                        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                    )
                ]
            )
        )
    assert not torch.equal(*results)
    assert torch.corrcoef(torch.stack(results))[0, 1] > 0.99


def test_held_out_sums_come_out_right(make_llm, demo_model, sums):  # noqa: F811
    llm = make_llm(demo_model, device="cpu", dtype="bfloat16", kv_cache_dtype="fp8")
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate([question for question, _ in sums], params, use_tqdm=False)
    assert share_right(outputs, sums) >= 0.97  # 0.985: three bits of mantissa are few for it


def test_twice_the_blocks_of_bfloat16_fit(tiny_model):
    shape = KVCacheShape(2, 64, 2, 32, torch.bfloat16)
    assert shape.block_bytes == 2 * KVCacheShape(2, 64, 2, 32, torch.float8_e4m3fn).block_bytes
    options = {"device": "cpu", "dtype": "bfloat16", "cpu_kvcache_space_gib": 0.001}
    counts = []
    for kv_cache_dtype in ("auto", "fp8"):
        with LLM(tiny_model, kv_cache_dtype=kv_cache_dtype, **options) as llm:
            counts.append(llm._engine.scheduler.blocks.num_blocks)
            cache = llm._engine._executor._runner._kv_cache
            assert cache.dtype == (torch.bfloat16 if len(counts) == 1 else torch.float8_e4m3fn)
    assert counts[1] == 2 * counts[0] or counts[1] == 2 * counts[0] + 1


def test_scales_follow_the_weights_in_place(tiny_llm, expected):
    llm = tiny_llm(kv_cache_dtype="fp8")
    scales = scales_of(llm)
    first, address = scales.clone(), scales.data_ptr()
    weights = load_file(llm._engine.model_dir / "model.safetensors")
    # Far beyond what the old scale holds: 448 times it would saturate nearly everything.
    llm.load_weights([(V_PROJ, weights[V_PROJ] * 4096)])
    assert torch.equal(scales[1, 1], first[1, 1] * 4096)
    assert torch.equal(scales[0], first[0]) and torch.equal(scales[1, 0], first[1, 0])
    assert tokens_of(llm) != expected
    llm.load_weights([(V_PROJ, weights[V_PROJ])])
    assert torch.equal(scales, first)
    assert tokens_of(llm) == expected
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens_of(llm) == expected
    assert scales_of(llm) is scales and scales.data_ptr() == address


def test_scales_are_powers_of_two_with_room_above_the_largest_value(tiny_llm):
    """Each layer and head has its own, so that none drowns beside a loud one."""
    llm = tiny_llm(kv_cache_dtype="fp8")
    scales = scales_of(llm)
    assert scales.shape == (2, 2, 2) and scales.dtype == torch.float32
    mantissas, _ = torch.frexp(scales)
    assert (mantissas == 0.5).all()
    tokens_of(llm)
    stored = llm._engine._executor._runner._kv_cache.float().flatten(2, 3)
    # Unwritten blocks hold anything; what was written is at most half of the range.
    used = stored[:, :, :16].abs().amax(dim=(2, 4)).mT
    assert (used > 448 / 64).all() and (used < 448).all()


def test_it_goes_with_fp8_weights(tiny_llm):
    """Calibration asks for the model's dtype, which is not that of any weight."""
    llm = tiny_llm(kv_cache_dtype="fp8", quantization="fp8")
    assert all(len(tokens) == 16 for tokens in tokens_of(llm))


def test_dummy_weights_are_calibrated_too(tiny_llm):
    llm = tiny_llm(kv_cache_dtype="fp8", load_format="dummy")
    assert (scales_of(llm) < 2**-4).all()
    assert all(len(tokens) == 16 for tokens in tokens_of(llm))


def test_without_it_nothing_is_calibrated(tiny_llm):
    assert scales_of(tiny_llm()) is None


def test_what_the_gpu_kernels_cannot_do_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device, fp8 = torch.device("cuda"), Config("model", kv_cache_dtype="fp8")
    check_kv_cache(Config("model"), 128, device)
    check_kv_cache(Config("model", kv_cache_dtype="fp8", attention_backend="sdpa"), 16, device)
    with pytest.raises(ValueError, match="compute capability 8.9 or later, this one has 8.0"):
        check_kv_cache(fp8, 128, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_kv_cache(fp8, 32, device)
    with pytest.raises(ValueError, match="head_dim of 32 or more, this model has 16"):
        check_kv_cache(fp8, 16, device)
