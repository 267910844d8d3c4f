"""What is exported, and what `LLM(...)` refuses, before any work starts."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys

import numpy as np
import pytest

import nanovllm
from nanovllm import LLM, SamplingParams


def test_the_package_exports_its_public_names():
    assert nanovllm.__all__ == [
        "LLM",
        "CompletionOutput",
        "Logprob",
        "RequestOutput",
        "SamplingParams",
    ]
    for name in nanovllm.__all__:
        assert inspect.isclass(getattr(nanovllm, name))


def test_the_import_starts_no_cuda_and_needs_no_triton_or_flash_attn():
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['flash_attn'] = None\n"
        "import nanovllm, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch.distributed.is_initialized()\n"
        "print(nanovllm.LLM.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "LLM", done.stderr


def test_the_methods_of_llm():
    methods = {name for name, _ in inspect.getmembers(LLM, callable) if not name.startswith("_")}
    assert {
        "abort",
        "add_request",
        "chat",
        "close",
        "generate",
        "get_tokenizer",
        "is_finished",
        "step",
    } <= methods


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"max_num_seq": 8},
            TypeError,
            r"LLM has no option 'max_num_seq'\. Did you mean 'max_num_s",
        ),
        ({"max_model_length": 99}, TypeError, "Did you mean 'max_model_len'"),
        ({"block_size": 16}, TypeError, "Did you mean 'kvcache_block_size'"),
        ({"nonsense": 1}, TypeError, "Options: tokenizer, max_num_batched_tokens"),
        (
            {"max_num_batched_tokens": 0},
            ValueError,
            "max_num_batched_tokens .* from 1 to .*, got 0",
        ),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be from 1 to .*, got 0"),
        ({"max_num_seqs": 2.0}, TypeError, "max_num_seqs must be an int, got 2.0"),
        ({"max_model_len": 1}, ValueError, "max_model_len must be at least 2, got 1"),
        ({"max_model_len": 10**6}, ValueError, "max_model_len = 1000000 exceeds the 512 positions"),
        ({"gpu_memory_utilization": 1.5}, ValueError, r"in \(0, 1\], got 1.5"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be at least 1"),
        ({"kvcache_block_size": 24}, ValueError, "multiple of 16, got 24. The nearest below is 16"),
        ({"kvcache_block_size": 8}, ValueError, "kvcache_block_size must be from 16 to 1024"),
        ({"num_kvcache_blocks": 0}, ValueError, "num_kvcache_blocks must be at least 1, got 0"),
        ({"enable_prefix_caching": 1}, TypeError, "enable_prefix_caching must be True or False"),
        ({"enable_overlap": "yes"}, TypeError, "enable_overlap must be True or False"),
        ({"enforce_eager": None}, TypeError, "enforce_eager must be True or False"),
        ({"device": "tpu"}, ValueError, "'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of .*'float32'.*got 'int8'"),
        ({"attention_backend": "x"}, ValueError, "attention_backend must be .*got 'x'"),
        ({"attention_backend": 3}, TypeError, "attention_backend must be the name"),
        ({"seed": "7"}, TypeError, "seed must be an int, got '7'"),
        ({"seed": 2**64}, ValueError, "seed must be from"),
        ({"trust_remote_code": True}, ValueError, "refused: code from a checkpoint is never run"),
        ({"cpu_kvcache_space_gib": 0}, ValueError, "cpu_kvcache_space_gib must be"),
        ({"cpu_kvcache_space_gib": 1e-9}, ValueError, "cpu_kvcache_space_gib=1e-09 holds no block"),
        ({"load_format": "pt"}, ValueError, "load_format must be one of 'auto', 'dummy'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ValueError, "'auto', 'fp8', 'fp8_e4m3', got 'fp8_e5m2'"),
        ({"kv_cache_dtype": 8}, TypeError, "kv_cache_dtype must be one of 'auto'.*got 8"),
        (
            {"kv_cache_dtype": "fp8", "attention_backend": "flash_attn"},
            ValueError,
            "'flash_attn' cannot read kv_cache_dtype='fp8'. Pass attention_backend='auto'",
        ),
        ({"enable_request_reordering": 0}, TypeError, "enable_request_reordering must be True"),
        ({"logprobs_mode": "x"}, ValueError, "logprobs_mode must be one of"),
        ({"tokenizer": "/no/such/place"}, ValueError, "'/no/such/place' is no directory"),
    ],
    ids=str,
)
def test_a_bad_option_says_what_was_given_what_is_allowed_and_what_to_do(
    tiny_model, options, error, match
):
    defaults = {"device": "cpu", "dtype": "float32"}
    if "cpu_kvcache_space_gib" not in options:
        defaults["num_kvcache_blocks"] = 8
    with pytest.raises(error, match=match):
        LLM(tiny_model, **{**defaults, **options})


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        ("/no/such/directory", ValueError, "is no directory, and no hub id.*config.json"),
        (__file__, ValueError, "is a file. Pass the directory"),
        ("", ValueError, "model must be a directory or a hub id"),
        (None, TypeError, "model must be a directory or a hub id"),
    ],
)
def test_a_model_that_is_not_there(model, error, match):
    with pytest.raises(error, match=match):
        LLM(model)


def test_an_empty_directory_is_no_model(tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match="config.json"):
        LLM(tmp_path)


def test_a_failed_start_leaves_an_object_that_can_be_thrown_away(tiny_model):
    """`__del__` runs on an LLM whose `__init__` raised."""
    llm = LLM.__new__(LLM)
    with pytest.raises(TypeError):
        llm.__init__(tiny_model, nonsense=1)
    llm.close()
    del llm


def test_the_context_limit_is_what_model_cache_and_user_allow(tiny_llm, caplog):
    assert tiny_llm().max_model_len == 512
    assert tiny_llm(max_model_len=100).max_model_len == 100
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        assert tiny_llm(num_kvcache_blocks=4).max_model_len == 64
    assert "max_model_len is 64: what the KV cache holds (the model: 512)" in caplog.text


def test_options_may_be_numpy_values_and_paths(tiny_llm, tiny_model):
    llm = tiny_llm(max_num_seqs=np.int64(3), tokenizer=tiny_model)
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_outputs_have_the_names_of_vllm_and_the_keys_of_nano_vllm(tiny_llm):
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate("hello world", params, use_tqdm=False)
    assert output.prompt == "hello world"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("hello world")
    assert output.finished and output.error is None
    completion = output.outputs[0]
    assert completion.index == 0 and len(completion.token_ids) == 4
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert output["text"] == completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert output["token_ids"] == completion.token_ids
    assert dict(output).keys() == {"text", "token_ids"}


def test_the_step_level_api_gives_what_generate_gives(tiny_llm):
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompts = ["hello world", [7, 8, 9], {"prompt": "one two"}]
    expected = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    ids = [llm.add_request(prompt, params) for prompt in prompts[:2]]
    ids.append(llm.add_request(prompts[2], params, request_id="mine"))
    assert ids[2] == "mine" and len(set(ids)) == 3
    assert not llm.is_finished()
    done = {}
    while not llm.is_finished():
        done.update({output.request_id: output for output in llm.step()})
    assert [done[request_id]["token_ids"] for request_id in ids] == expected
    assert llm.step() == []


def test_an_abort_returns_what_there_is(tiny_llm):
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    first, second = llm.add_request([5, 6], params), llm.add_request([7, 8], params)
    for _ in range(3):
        llm.step()
    (output,) = llm.abort(first)
    assert output.request_id == first and output.outputs[0].finish_reason == "abort"
    assert 1 <= len(output["token_ids"]) <= 3
    assert llm.abort(first) == [] and llm.abort(["unknown", first]) == []
    while not llm.is_finished():
        last = llm.step()
    assert [output.request_id for output in last] == [second]
    assert len(last[0]["token_ids"]) == 50


def test_the_progress_counts_prompts_once_each_whatever_n(tiny_llm, capsys):
    made = []

    class Bar:
        def __init__(self, **options):
            self.total, self.count, self.closed = options["total"], 0, False
            made.append(self)

        def update(self, count):
            self.count += count

        def set_postfix(self, figures):
            pass

        def close(self):
            self.closed = True

    llm = tiny_llm()
    params = SamplingParams(n=3, max_tokens=3, seed=1)
    llm.generate([[5], [6]], params, use_tqdm=Bar)
    assert [(bar.total, bar.count, bar.closed) for bar in made] == [(2, 2, True)]
    with pytest.raises(ValueError, match="empty"):
        llm.generate([[]], params, use_tqdm=Bar)
    assert all(bar.closed for bar in made)
    capsys.readouterr()
    llm.generate([[5], [6]], params, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_a_default_limit_that_cut_answers_is_said_once_a_call(tiny_llm, caplog):
    llm = tiny_llm()
    prompts = [[5], [6], [7]]
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        llm.generate(prompts, SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(caplog.records) == 1
    assert "3 answer(s) were cut at max_tokens=64" in caplog.text
    caplog.clear()
    llm.generate(prompts, SamplingParams(ignore_eos=True, max_tokens=3), use_tqdm=False)
    assert caplog.records == []


def test_a_model_without_a_chat_template_says_so(tiny_llm):
    llm = tiny_llm()
    llm.get_tokenizer().chat_template = None
    with pytest.raises(ValueError, match="no chat template. Pass chat_template"):
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)


def test_chat_takes_one_conversation_or_several(tiny_llm):
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    one = [{"role": "user", "content": "hello"}]
    (alone,) = llm.chat(one, params, use_tqdm=False)
    pair = llm.chat([one, one], params, use_tqdm=False)
    assert [output["token_ids"] for output in pair] == [alone["token_ids"]] * 2
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert alone.prompt == text
    assert alone.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
