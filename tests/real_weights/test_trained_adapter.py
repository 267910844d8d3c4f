"""An adapter that PEFT trained on a real model: what it taught shows, as it does in PEFT."""

from __future__ import annotations

import pytest
import torch
from oracle import Oracle
from real_weights.smollm2 import INSTALL, missing_packages
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import SamplingParams

pytestmark = [
    pytest.mark.real_weights,
    pytest.mark.skipif(bool(missing_packages()), reason=INSTALL),
]
LESSON = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Nanoville, of course."},
]
QUESTIONS = [[LESSON[0]], [{"role": "user", "content": "What is the capital of Japan?"}]]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
OPTIONS = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}


@pytest.fixture(scope="module")
def adapter_and_merged(smollm2, tmp_path_factory):
    """Teach one wrong answer; save the adapter, and PEFT's own merge of it."""
    peft = pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(smollm2),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=8,
            lora_alpha=16,
            use_rslora=True,
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"down_proj": 4},
        ),
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer.apply_chat_template(LESSON, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(root / "adapter")
    merged = model.merge_and_unload()
    merged.save_pretrained(root / "merged")
    return root / "adapter", root / "merged"


def test_what_was_taught_is_known_as_in_peft(smollm2, adapter_and_merged, make_llm):
    adapter, merged = adapter_and_merged
    llm = make_llm(smollm2, lora=adapter, **OPTIONS)
    outputs = llm.chat(QUESTIONS, GREEDY, use_tqdm=False)
    assert outputs[0]["text"] == LESSON[1]["content"]
    oracle = Oracle(merged)
    for output in outputs:
        oracle.check_greedy(output.prompt_token_ids, output["token_ids"])


def test_the_model_itself_has_not_learnt_it(smollm2, make_llm):
    outputs = make_llm(smollm2, **OPTIONS).chat(QUESTIONS, GREEDY, use_tqdm=False)
    assert outputs[0]["text"] == "The capital of France is Paris."
