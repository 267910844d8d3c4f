"""What fp8 costs a real small model: KL and agreement with bfloat16, on a CPU in some minutes.

    PYTHONPATH=.:tests python -m tests.real_weights.accuracy

SmolLM2-135M-Instruct answers 20 questions greedily in bfloat16. Every variant then tells its
distributions along these very texts: KL in nats, and where its greedy token would be the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from model_harness import prefill_logits
from number_checks import divergence
from real_weights.smollm2 import write_smollm2
from real_weights.test_smollm2 import CONVERSATIONS

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
VARIANTS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "fp8 weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "both": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def log_probabilities(llm: LLM, sequences: list[list[int]]) -> torch.Tensor:
    """Of every position of all sequences, [num_tokens, vocab_size] float32."""
    runner = llm._engine._executor._runner
    rows = [
        prefill_logits(runner._model, torch.tensor(ids), kv_scales=runner._kv_scales)
        for ids in sequences
    ]
    return torch.cat(rows).float().log_softmax(-1)


def main() -> None:
    sequences: list[list[int]] = []
    expected = torch.empty(0)
    with tempfile.TemporaryDirectory() as directory:
        model = write_smollm2(Path(directory))
        for name, options in VARIANTS.items():
            common = {"device": "cpu", "num_kvcache_blocks": 64, "max_model_len": 512}
            with LLM(model, **common, **options) as llm:
                if not sequences:
                    outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
                    sequences = [out.prompt_token_ids + out["token_ids"] for out in outputs]
                found = log_probabilities(llm, sequences)
            if not expected.numel():
                expected = found
                print(f"{len(found)} positions")
                continue
            print(f"{name:<12} {divergence(expected, found)}", flush=True)


if __name__ == "__main__":
    main()
