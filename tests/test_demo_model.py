"""The trained demo model answers sums exactly, so a wrong engine shows at once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from oracle import Oracle

from nanovllm import SamplingParams
from nanovllm.utils.tokenizer import stop_token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def sums(demo_model):
    """The 400 held-out sums: (text of the question, its answer)."""
    keys = json.loads((demo_model / "arithmetic_pairs.json").read_text())
    (held_out,) = [pairs for name, pairs in keys.items() if name != "train"]
    results = [(f"{a}{sign}{b}=", str({"+": a + b, "-": a - b}[sign])) for a, sign, b in held_out]
    assert len(results) == 400
    return results


def share_right(outputs, sums):
    assert len(outputs) == len(sums)
    assert [output.outputs[0].finish_reason for output in outputs].count("stop") >= 0.99 * len(sums)
    right = [
        output["text"].strip() == answer for output, (_, answer) in zip(outputs, sums, strict=True)
    ]
    return sum(right) / len(right)


# Chunks and waiting.
SMALL = {"kvcache_block_size": 16, "num_kvcache_blocks": 24, "max_num_batched_tokens": 100}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "enable_overlap": True},
        {"dtype": "float32", "enable_overlap": True, **SMALL},
        {"dtype": "bfloat16", "enable_prefix_caching": False, **SMALL},
    ],
    ids=str,
)
def test_held_out_sums_come_out_right_as_completions_and_as_chats(
    make_llm, demo_model, sums, options
):
    llm = make_llm(demo_model, device="cpu", **{"max_num_seqs": 256, **options})
    outputs = llm.generate([question for question, _ in sums], GREEDY, use_tqdm=False)
    assert share_right(outputs, sums) >= 0.99
    conversations = [[{"role": "user", "content": question}] for question, _ in sums]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert share_right(outputs, sums) >= 0.99
    blocks = llm._engine.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks


def test_both_end_tokens_end_an_answer(make_llm, demo_model):
    """The tokenizer names one of them, generation_config.json both."""
    llm = make_llm(demo_model, device="cpu", dtype="float32")
    (completion,) = llm.generate("12+34=", GREEDY, use_tqdm=False)
    (chat,) = llm.chat([{"role": "user", "content": "12+34="}], GREEDY, use_tqdm=False)
    assert completion["text"].strip() == chat["text"].strip() == "46"
    assert completion["token_ids"][-1] == 0 and chat["token_ids"][-1] == 2
    assert completion.outputs[0].finish_reason == chat.outputs[0].finish_reason == "stop"


def test_english_equals_transformers(make_llm, demo_model):
    llm = make_llm(demo_model, device="cpu", dtype="float32", kvcache_block_size=16)
    oracle = Oracle(demo_model)
    prompts = ["In the beginning God", "Call me Ishmael. Some years ago"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        oracle.check_greedy(output.prompt_token_ids, output["token_ids"])
        assert len(output["token_ids"]) == 24


def test_a_text_ends_at_what_any_of_three_files_says(tmp_path):
    """config.json, generation_config.json (a list or a number) and the tokenizer."""
    tokenizer = SimpleNamespace(eos_token_id=7)
    path = tmp_path / "generation_config.json"
    for stated, expected in (([3, 5], [2, 3, 5, 7]), (3, [2, 3, 5, 7]), (None, [2, 5, 7])):
        path.write_text(json.dumps({"eos_token_id": stated}))
        assert stop_token_ids(tmp_path, tokenizer, (5, 2), 100) == expected
    path.unlink()
    assert stop_token_ids(tmp_path, None, (), 100) == []
