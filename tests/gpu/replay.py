"""A short run of the demo model on replayed graphs, for a sanitizer: prefill, padding, filters.

PYTHONPATH=. python tests/gpu/replay.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "tiny-qwen3"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SUMS = {f"{a}+{b}=": str(a + b) for a, b in [(12, 34), (40, 41), (8, 10), (20, 22), (16, 3)]}


def main() -> int:
    options = {"num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_num_seqs": 8}
    with LLM(MODEL, max_num_batched_tokens=64, max_model_len=256, **options) as llm:
        # 5 rows on a graph of 8, then fewer and fewer: padding rows.
        first = llm.generate(list(SUMS), GREEDY, use_tqdm=False)
        filters = GREEDY.clone(temperature=1.0, top_k=1, logprobs=1)
        again = llm.generate(list(SUMS)[:2], filters, use_tqdm=False)
        # A prompt of several chunks and of cached blocks.
        long = llm.generate(["And it came to pass " * 12] * 2, GREEDY, use_tqdm=False)
    right = [output["text"].strip() == SUMS[output.prompt] for output in [*first, *again]]
    print(
        f"{sum(right)} of {len(right)} right, {len(long[0]['token_ids'])} tokens of a long prompt"
    )
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
