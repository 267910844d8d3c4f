"""A script as users of vLLM write it, with another import; and the defaults of a model."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

from nanovllm import LLM, SamplingParams


def test_a_script_written_for_vllm_runs(demo_model):
    prompts = ["12+34=", "In the beginning"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)

    llm = LLM(
        model=str(demo_model),
        dtype="float32",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        seed=0,
    )
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        generated_text = output.outputs[0].text
        assert output.prompt == prompt and isinstance(generated_text, str)
        assert output.request_id and output.finished
        assert output.prompt_token_ids == llm.get_tokenizer().encode(prompt)
        assert output.outputs[0].finish_reason in ("stop", "length")
    assert outputs[0].outputs[0].text == "46"

    params = SamplingParams(
        n=2, temperature=1.0, max_tokens=16, stop=["\n", "."], logprobs=5, prompt_logprobs=1
    )
    for output in llm.generate(["And it came to pass"], params, use_tqdm=False):
        assert [completion.index for completion in output.outputs] == [0, 1]
        for completion in output.outputs:
            assert completion.cumulative_logprob < 0
            assert len(completion.token_ids) == len(completion.logprobs)
            for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
                assert position[token_id].logprob <= 0 and position[token_id].rank >= 1
                assert isinstance(position[token_id].decoded_token, str)
            assert "." not in completion.text
            if completion.finish_reason == "stop":
                assert completion.stop_reason in ("\n", ".", None)
        assert output.prompt_logprobs[0] is None

    conversation = [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "12+34="},
    ]
    outputs = llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert len(outputs) == 1 and outputs[0].outputs[0].text
    outputs = llm.chat([conversation[1:]] * 2, llm.get_default_sampling_params(), use_tqdm=False)
    assert len(outputs) == 2
    outputs = llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, use_tqdm=False)
    assert outputs[0].prompt is None
    llm.close()


def with_defaults(model, directory, **fields):
    shutil.copytree(model, directory)
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True},
         SamplingParams(temperature=0.6, top_p=0.95, top_k=20)),
        ({"repetition_penalty": 1.1, "max_new_tokens": 7},
         SamplingParams(repetition_penalty=1.1, max_tokens=7)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0)),
        ({"min_p": 0.1, "temperature": None, "eos_token_id": [2, 0], "unknown": 3},
         SamplingParams(min_p=0.1)),
    ],
    ids=str,
)  # fmt: skip
def test_the_defaults_of_a_model(make_llm, tiny_model, tmp_path, fields, expected):
    """Row 59: nothing of generation_config is used unless asked for, and then all that we know."""
    directory = with_defaults(tiny_model, tmp_path / "model", **fields)
    llm = make_llm(directory, device="cpu", dtype="float32", num_kvcache_blocks=8)
    assert llm.get_default_sampling_params() == expected


def test_defaults_are_used_and_said_once_and_never_mixed_with_explicit_ones(
    make_llm, tiny_model, tmp_path, caplog
):
    fields = {"repetition_penalty": 3.0, "max_new_tokens": 9, "do_sample": False}
    directory = with_defaults(tiny_model, tmp_path / "model", **fields)
    llm = make_llm(directory, device="cpu", dtype="float32", num_kvcache_blocks=32)
    prompt = [5, 6, 7]
    same = SamplingParams(temperature=0, repetition_penalty=3.0, max_tokens=9)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        found = [llm.generate([prompt], use_tqdm=False)[0] for _ in range(2)]
        found.append(dict(llm.generate_iter([prompt]))[0])
        streamed = "".join(llm.stream(prompt))
        (by_chat,) = llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
        lines = [r.message for r in caplog.records if "using the model's defaults" in r.message]
        (asked,) = llm.generate([prompt], same, use_tqdm=False)
    assert len(lines) == 1 and "repetition_penalty=3.0" in lines[0]
    assert all(output["token_ids"] == asked["token_ids"] for output in found)
    assert streamed == asked["text"] and len(by_chat["token_ids"]) <= 9
    explicit = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([prompt], explicit, use_tqdm=False)
    assert len(output["token_ids"]) == 12
    assert output["token_ids"][:9] != asked["token_ids"], "no penalty"


def test_defaults_that_are_not_followed_are_named(make_llm, tiny_model, tmp_path, caplog):
    fields = {"no_repeat_ngram_size": 1, "num_beams": 1, "suppress_tokens": [5], "typical_p": 1.0}
    directory = with_defaults(tiny_model, tmp_path / "model", **fields, max_new_tokens=2)
    llm = make_llm(directory, device="cpu", dtype="float32", num_kvcache_blocks=8)
    llm.generate([[5]], use_tqdm=False)
    llm.generate([[5]], use_tqdm=False)
    lines = [line for line in caplog.messages if "is not followed" in line]
    assert len(lines) == 1 and "no_repeat_ngram_size=1, suppress_tokens=[5] is not" in lines[0]


def test_a_bad_default_names_its_file(make_llm, tiny_model, tmp_path):
    directory = with_defaults(tiny_model, tmp_path / "model", temperature=-1)
    llm = make_llm(directory, device="cpu", dtype="float32", num_kvcache_blocks=8)
    with pytest.raises(ValueError, match=r"generation_config.json: temperature must be"):
        llm.get_default_sampling_params()
    llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
