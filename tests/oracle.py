"""Hugging Face transformers, float32 on the CPU, one request at a time: what is right."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-4  # below it float32 sums in another order may choose either token


class Oracle:
    """Greedy tokens of a checkpoint, with the margin of each choice."""

    def __init__(self, model_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], list[float]]] = {}

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] float32"""
        return self.model(torch.tensor([token_ids])).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """The next `num_tokens` tokens, ignoring eos, and by how much each was the best."""
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            ids, margins, cache = torch.tensor([prompt]), [], None
            tokens: list[int] = []
            for _ in range(num_tokens):
                output = self.model(ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                best = output.logits[0, -1].topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
                ids = best.indices[:1].unsqueeze(0)
            self._known[key] = tokens, margins
        return self._known[key]

    def check_greedy(self, prompt: list[int], answer: list[int], margin: float = MARGIN) -> None:
        """Assert that `answer` is the greedy one, up to the first near-tie."""
        expected, margins = self.greedy(prompt, len(answer))
        for place, (ours, theirs, lead) in enumerate(zip(answer, expected, margins, strict=True)):
            if lead < margin:
                return
            assert ours == theirs, f"token {place} is {ours}, not {theirs} (margin {lead:.2g})"
