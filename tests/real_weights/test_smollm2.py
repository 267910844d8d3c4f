"""A real chat model answers as it does in transformers, token by token, and knows what it knows.

Random weights cannot show a wrong rope base, a wrong norm epsilon or a template that is off by a
newline, since any of them gives text that is as random as before.
"""

from __future__ import annotations

import pytest
from oracle import Oracle
from real_weights.smollm2 import INSTALL, missing_packages

from nanovllm import SamplingParams

pytestmark = [
    pytest.mark.real_weights,
    pytest.mark.skipif(bool(missing_packages()), reason=INSTALL),
]

# What the model says in transformers, greedily and in float32; it is small, and not always right.
KNOWN = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is the capital of Germany?": "The capital of Germany is Berlin.",
    "What is the capital of Egypt?": "The capital of Egypt is Cairo.",
    "What is the largest ocean on Earth?": "Pacific Ocean",
    "Who wrote Romeo and Juliet?": "William Shakespeare",
    "Who painted the Mona Lisa?": "Leonardo da Vinci",
    "What is the chemical symbol for water?": "The chemical symbol for water is H2O.",
    "What is the chemical symbol for gold?": "The chemical symbol for gold is Au.",
    "How many days are in a week?": "7 days",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What color is the sky on a clear day?": "blue",
    "What is 2 + 2?": "4.",
    "What language is spoken in Brazil?": "Portuguese",
    "In which year did World War II end?": "1945",
    "What is the boiling point of water in degrees Celsius?": "100.0 degrees Celsius",
    "What is the currency of Japan?": "Japanese Yen (JPY)",
    "Who wrote Hamlet?": "William Shakespeare",
    "What gas do plants absorb from the air?": "carbon dioxide",
    'Translate "good morning" into French.': "Bonjour",
}
CONVERSATIONS = [[{"role": "user", "content": question}] for question in KNOWN]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
# Chunked prefill, rows that wait, and prefix hits on the system prompt that the template adds.
OPTIONS = {
    "device": "cpu",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 80,
    "max_num_batched_tokens": 256,
}


def test_answers_equal_those_of_transformers(smollm2, make_llm):
    llm = make_llm(smollm2, dtype="float32", **OPTIONS)
    outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    tokenizer, oracle = llm.get_tokenizer(), Oracle(smollm2)
    for messages, output in zip(CONVERSATIONS, outputs, strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert output.prompt_token_ids == ids
        oracle.check_greedy(ids, output["token_ids"])
        assert KNOWN[messages[0]["content"]] in output["text"]


def test_bfloat16_still_knows_the_answers(smollm2, make_llm):
    """Near-ties go the other way in half precision, and a sentence that begins otherwise may end
    elsewhere: transformers too loses some. Broken arithmetic would lose them all."""
    llm = make_llm(smollm2, dtype="bfloat16", **OPTIONS)
    outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    known = zip(KNOWN.values(), outputs, strict=True)
    assert sum(answer in output["text"] for answer, output in known) >= 16
