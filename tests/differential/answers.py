"""What each request gets alone: one at a time, nothing shared, nothing chunked, nothing ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput

# Float32 sums in another order differ by about 1e-5 where logits are several units wide.
TOLERANCE = 2e-3
_NUM_SHAKES = 24
_SHAKE = 2e-4


class Alone:
    """An engine for one sequence at a time, and a memory of its answers."""

    def __init__(self, model_dir: Path) -> None:
        self.llm = LLM(
            model_dir,
            device="cpu",
            dtype="float32",
            kvcache_block_size=16,
            num_kvcache_blocks=64,
            max_num_seqs=1,
            enable_prefix_caching=False,
            enable_overlap=False,
        )
        self._known: dict[Any, RequestOutput] = {}
        self.num_near_ties = 0

    def forget(self) -> None:
        """Between workloads, which share no requests: log-probabilities take megabytes each."""
        self._known.clear()

    def answer(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        key = (repr(prompt), params)
        if key not in self._known:
            (self._known[key],) = self.llm.generate([prompt], params, use_tqdm=False)
        return self._known[key]

    def check(self, found: RequestOutput, prompt: Any, params: SamplingParams) -> None:
        """Assert that an output is the one of the request alone; an aborted one, its beginning."""
        expected = self.answer(prompt, params)
        assert found.error is None and found.finished
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert [out.index for out in found.outputs] == list(range(params.n))
        for ours, right in zip(found.outputs, expected.outputs, strict=True):
            place = _first_difference(ours, right)
            if place is not None:
                head = ours.token_ids[: place + 1]
                assert self._is_near_tie(prompt, params, ours.index, head), (
                    f"answer {ours.index} is {ours.token_ids} ({ours.finish_reason}), alone it is "
                    f"{right.token_ids} ({right.finish_reason})"
                )
                self.num_near_ties += 1
            elif ours.finish_reason == "abort":
                # What half a character would end is held back, or shown as it is once it ends.
                text = ours.text.rstrip("\ufffd")
                assert right.text.startswith(text) or text.startswith(right.text)
            else:
                assert ours.text == right.text
                assert ours.finish_reason == right.finish_reason
                assert ours.stop_reason == right.stop_reason
            _check_logprobs(ours.logprobs, right.logprobs, upto=place)
        is_whole = all(out.finish_reason != "abort" for out in found.outputs)
        if is_whole:
            _check_logprobs(found.prompt_logprobs, expected.prompt_logprobs)

    def _is_near_tie(
        self, prompt: Any, params: SamplingParams, index: int, head: list[int]
    ) -> bool:
        """Whether logits that differ by no more than rounding may give `head` too."""
        for seed in range(_NUM_SHAKES):
            generator = torch.Generator().manual_seed(seed)

            def shake(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                return logits + _SHAKE * torch.randn(logits.shape, generator=generator)  # noqa: B023

            shaken = params.clone(logits_processors=[*params.logits_processors, shake])
            (output,) = self.llm.generate([prompt], shaken, use_tqdm=False)
            if output.outputs[index].token_ids[: len(head)] == head:
                return True
        return False


def _first_difference(ours: CompletionOutput, right: CompletionOutput) -> int | None:
    """The first token that is not the right one; None if there is none, or ours was cut short."""
    pairs = zip(ours.token_ids, right.token_ids, strict=False)
    for place, (a, b) in enumerate(pairs):
        if a != b:
            return place
    num_ours, num_right = len(ours.token_ids), len(right.token_ids)
    if ours.finish_reason == "abort" and num_ours <= num_right:
        return None
    return None if num_ours == num_right else min(num_ours, num_right)


def _check_logprobs(ours: Any, right: Any, upto: int | None = None) -> None:
    assert (ours is None) == (right is None)
    if ours is None:
        return
    for place, (a, b) in enumerate(zip(ours, right, strict=False)):
        if place == upto:
            return
        assert (a is None) == (b is None)
        if a is None:
            continue
        # Which of two equally likely ones is the k-th may differ.
        mine, theirs = (sorted((e.logprob for e in p.values()), reverse=True) for p in (a, b))
        assert len(mine) == len(theirs), f"{len(mine)} entries at {place}, alone {len(theirs)}"
        assert torch.allclose(
            torch.tensor(mine), torch.tensor(theirs), atol=TOLERANCE, rtol=0, equal_nan=True
        ), f"logprobs at {place}: {mine[:4]}, alone {theirs[:4]}"
        for token_id in a.keys() & b.keys():
            assert abs(a[token_id].logprob - b[token_id].logprob) <= TOLERANCE or (
                a[token_id].logprob == b[token_id].logprob
            )
