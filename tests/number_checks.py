"""One engine's numbers against transformers in float32: tokens at every edge, log-probabilities."""

from __future__ import annotations

import torch
from oracle import Oracle

from nanovllm import LLM, SamplingParams
from nanovllm.engine.cuda_graph import graph_sizes
from nanovllm.outputs import RequestOutput


def prompts_of(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    low = min(3, vocab_size - 1)
    return [torch.randint(low, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def edge_lengths(max_model_len: int, *granules: int) -> list[int]:
    """One token more and one less than each multiple of what work is divided by."""
    edges = {1, 2, max_model_len - 2, max_model_len - 1}
    for granule in granules:
        for edge in range(granule, max_model_len, granule):
            edges |= {edge - 1, edge, edge + 1}
    return sorted(n for n in edges if 1 <= n < max_model_len)


def edge_batches(max_num_seqs: int) -> list[int]:
    """One row more and one less than each size that a graph is captured for."""
    sizes = {n for size in graph_sizes(max_num_seqs) for n in (size - 1, size, size + 1)}
    return sorted(n for n in sizes if 1 <= n <= max_num_seqs + 1)


def check_tokens(
    llm: LLM, oracle: Oracle, prompts: list[list[int]], num_tokens: int, margin: float
) -> None:
    """Greedy tokens are the oracle's where it leads by `margin`; also from a warm cache."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            num_left = llm.max_model_len - len(prompt)
            assert len(output["token_ids"]) == min(num_tokens, num_left)
            oracle.check_greedy(prompt, output["token_ids"], margin)


def check_likeliest(llm: LLM, oracle: Oracle, prompts: list[list[int]], num_top: int = 8) -> None:
    """Each prompt token's log-probability and those of the likeliest ones are the oracle's."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=num_top)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        exact = oracle.logits(prompt).float().log_softmax(dim=-1)
        assert output.prompt_logprobs is not None
        for row, position in enumerate(output.prompt_logprobs[1:]):
            assert position is not None and prompt[row + 1] in position
            for token_id, entry in position.items():
                assert abs(entry.logprob - float(exact[row, token_id])) < 1e-3
            best = sorted((e.logprob for e in position.values()), reverse=True)[:num_top]
            expected = exact[row].topk(num_top).values
            torch.testing.assert_close(torch.tensor(best), expected, atol=1e-3, rtol=0)


def logprobs_of(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of each prompt's tokens but the first, [num_tokens - 1, vocab_size] float32."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [_as_tensor(output, llm) for output in outputs]


def _as_tensor(output: RequestOutput, llm: LLM) -> torch.Tensor:
    assert output.prompt_logprobs is not None
    positions = [position for position in output.prompt_logprobs if position is not None]
    rows = torch.full((len(positions), llm._engine.model_config.vocab_size), float("nan"))
    for row, position in enumerate(positions):
        rows[row, list(position)] = torch.tensor([e.logprob for e in position.values()])
    assert rows.isfinite().all(), "every token has a probability"
    return rows


def divergence(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Say how far log-probabilities, [num_tokens, vocab_size] both, are apart: KL is in nats."""
    kl = (expected.exp() * (expected - found)).sum(-1)
    same = (expected.argmax(-1) == found.argmax(-1)).double().mean()
    return f"KL {kl.mean():.2e} (max {kl.max():.1e}), same token {same:.1%}"


def exact_logprobs(oracle: Oracle, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [oracle.logits(prompt)[:-1].float().log_softmax(dim=-1) for prompt in prompts]


def mean_distance(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float(
        torch.cat([(a - b).abs().mean(dim=-1) for a, b in zip(ours, exact, strict=True)]).mean()
    )
