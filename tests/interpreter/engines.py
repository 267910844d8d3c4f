"""A whole engine as a GPU would run it, in Triton's interpreter: every kernel, padded decode steps.

What a GPU hides until it strikes shows here at once: accesses outside of tensors are errors (see
`interpreter_bounds`), and memory that nobody wrote holds NaN, or indices that lie in no tensor.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
import torch
from quantization.fp8_checkpoints import write_quantized
from tiny_models import make_tiny

import nanovllm.fused
import nanovllm.quantization.model
import nanovllm.sampling.redraw
from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner, warmup
from nanovllm.engine.cuda_graph import graph_sizes
from nanovllm.outputs import RequestOutput

_UNWRITTEN_INT = 0x3FFFFFF0  # as an index it lies in no tensor
VOCAB_SIZE = 331


@dataclass(frozen=True)
class Case:
    """An engine and what it is asked, drawn from a number."""

    architecture: str
    model: dict[str, Any]
    weights: str  # "plain", or a kind of fp8 checkpoint
    options: dict[str, Any]
    prompts: list[list[int]] = field(repr=False)
    params: list[SamplingParams] = field(repr=False)

    @property
    def backend(self) -> str:
        """The one that takes kernels, where they fit."""
        sizes = self.model
        size = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        is_small = size < 32 and self.options["kv_cache_dtype"] == "fp8"
        return "triton" if size in (16, 32, 64, 128, 256) and not is_small else "sdpa"

    @property
    def is_rounded(self) -> bool:
        """Whether fp8 or 16 bits make answers part that float32 would keep together."""
        fp8 = self.weights != "plain" or "fp8" in self.options.values()
        return fp8 or self.options["dtype"] != "float32"


def draw_case(number: int) -> Case:
    """Whatever is odd: sizes, budgets, small caches, long rows beside short ones."""
    random_ = random.Random(number)
    pick = random_.choice
    kind = pick(["qwen3", "qwen3", "qwen2", "llama", "mistral", "phi3", "moe", "moe", "fused"])
    weights = pick(["plain", "plain", "online", "channel", "block"])
    if kind == "fused":
        weights = "plain"
    is_block = weights == "block"
    num_kv_heads = pick([1, 2]) if is_block else pick([1, 1, 2, 3])
    group = pick([1, 2]) if is_block else pick([1, 2, 3, 5, 7])
    head_dim = 128 if is_block else pick([16, 32, 32, 64, 128, 256, 80])
    num_heads = num_kv_heads * group
    hidden_size = 128 if is_block else num_heads * pick([8, 20, 40])
    inner = 128 if is_block else pick([24, 56, 96, 130])
    architecture = {
        "qwen3": "Qwen3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "moe": "Qwen3MoeForCausalLM",
        "fused": "Qwen3ForCausalLM",
    }[kind]
    model: dict[str, Any] = {}
    if kind in ("qwen2", "phi3"):  # no head_dim of its own
        hidden_size = num_heads * head_dim
    else:
        model["head_dim"] = head_dim
    if kind == "phi3" and weights in ("channel", "block"):  # whose projections come fused
        weights = "online"
    if kind == "moe":
        num_experts = pick([3, 5, 8])
        top_k = random_.randint(1, min(num_experts, 4))
        model |= {"num_experts": num_experts, "num_experts_per_tok": top_k}
        model |= {"moe_intermediate_size": inner, "norm_topk_prob": pick([True, False])}
    if kind == "mistral":
        model["sliding_window"] = pick([None, 37, 61])
    if kind == "fused":
        hidden_size, num_heads, num_kv_heads, inner = 512, 4, pick([1, 2]), 512
        model["head_dim"] = 128
    model |= {
        "hidden_size": hidden_size, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "intermediate_size": inner,
        "num_hidden_layers": pick([1, 1, 2]), "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": pick([True, False]), "seed": number,
    }  # fmt: skip
    block_size = pick([16, 16, 32, 48, 64, 256])
    max_model_len = min(pick([17, 33, 47, 64, 65]), model.get("sliding_window") or 65)
    num_blocks = -(-max_model_len // block_size) + pick([0, 1, 2, 6])
    options: dict[str, Any] = {
        "dtype": "bfloat16" if kind == "fused" else "float32",
        "kv_cache_dtype": pick(["auto", "auto", "fp8"]),
        "kvcache_block_size": block_size, "num_kvcache_blocks": num_blocks,
        "max_model_len": max_model_len, "max_num_seqs": random_.randint(1, 6),
        "max_num_batched_tokens": pick([1, 5, 19, 40, 64]), "seed": number,
        "enable_overlap": pick([True, True, False]),
        "enable_prefix_caching": pick([True, True, False]),
    }  # fmt: skip
    if kind == "fused" or "sliding_window" in model:
        options["max_num_batched_tokens"] = max(19, options["max_num_batched_tokens"])
    if weights == "online":
        options["quantization"] = "fp8"
    num_prompts = random_.randint(2, 4)
    longest = max_model_len - 2
    shared = [random_.randrange(VOCAB_SIZE) for _ in range(longest)]
    prompts, params = [], []
    for _ in range(num_prompts):
        length = min(longest, pick([1, 2, longest, random_.randint(1, longest), 20]))
        own = [random_.randrange(VOCAB_SIZE) for _ in range(length)]
        num_shared = pick([0, length // 2, length])
        prompts.append(shared[:num_shared] + own[num_shared:])
        more: dict[str, Any] = {"temperature": 0.0}
        if random_.random() < 0.3:
            more = {"temperature": 0.8, "seed": number, "top_p": pick([1.0, 0.7])}
            more |= {"top_k": pick([-1, 5]), "min_p": pick([0.0, 0.05])}
            more |= {"presence_penalty": pick([0.0, 0.5]), "repetition_penalty": pick([1.0, 1.2])}
        more |= {"max_tokens": random_.randint(1, 4), "ignore_eos": pick([True, False])}
        params.append(SamplingParams(logprobs=1, prompt_logprobs=pick([None, 0]), **more))
    return Case(architecture, model, weights, options, prompts, params)


def write_model(case: Case, directory: Path) -> Path:
    """Write the case's checkpoint, without a tokenizer."""
    plain = directory / "plain"
    make_tiny(case.architecture, **case.model).save_pretrained(plain)
    if case.weights in ("plain", "online"):
        return plain
    return write_quantized(plain, directory / "fp8", case.weights)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Engines built and run in the `with` block take kernels wherever a GPU would."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("nanovllm.") and hasattr(module, "use_triton"):
                patch.setattr(module, "use_triton", lambda x: True)
        # Shorter than what a GPU takes, as a program takes milliseconds here.
        patch.setattr(model_runner, "LONG_PROMPT", 20)
        # The library's products are for real GPUs.
        patch.setattr(
            "nanovllm.quantization.kernels.fp8_gemm._has_library", lambda *arguments: False
        )
        leave_unwritten(patch)
        yield


def leave_unwritten(patch: pytest.MonkeyPatch) -> None:
    """Fill what torch leaves as it finds it with what must not be used."""

    def spoilt(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.numel():
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.fill_(torch.nan)
            elif tensor.dtype.itemsize == 1:
                tensor.view(torch.uint8).fill_(0x7F)  # NaN in e4m3
            else:
                tensor.fill_(_UNWRITTEN_INT)
        return tensor

    def spoiling(function: Any) -> Any:
        return lambda *args, **kwargs: spoilt(function(*args, **kwargs))

    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"),
    ):  # fmt: skip
        patch.setattr(owner, name, spoiling(getattr(owner, name)))


class PaddedSteps:
    """In the place of DecodeGraphs: steps of the sizes that graphs have, run one by one."""

    def __init__(self, runner: Any, max_num_seqs: int) -> None:
        self._runner = runner
        self._sizes = graph_sizes(max_num_seqs)

    def has(self, num_rows: int) -> bool:
        return True

    def replay(self, num_rows: int) -> None:
        size = next(size for size in self._sizes if size >= num_rows)
        self._runner._decode_step(size)


@contextmanager
def short_calibration() -> Iterator[None]:
    """In both engines, which have the same scales then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.kv_calibration._NUM_TOKENS", 20)
        yield


def answers_of_kernels(case: Case, directory: Path) -> list[RequestOutput]:
    """Start an engine as on a GPU, its blank steps included, and let it answer."""
    with as_on_a_gpu(), short_calibration(), pytest.MonkeyPatch.context() as patch:
        one_thread = partial(_in_one_thread, warmup.run_in_threads)
        patch.setattr(model_runner, "run_in_threads", one_thread)
        with LLM(directory, device="cpu", attention_backend=case.backend, **case.options) as llm:
            runner = llm._engine._executor._runner
            model = runner._model.model
            if all(nanovllm.fused.fits(layer) for layer in model.layers):
                weight = model.norm.weight
                is_bfloat16 = weight.dtype is torch.bfloat16
                model.run = nanovllm.fused.FusedLayers(weight.device, has_five=is_bfloat16)
            rows = runner._rows.clone()
            runner._compile_kernels()
            torch.testing.assert_close(runner._rows[:, 1:], rows[:, 1:], rtol=0, atol=0)
            runner.make_ready()
            runner._graphs = PaddedSteps(runner, case.options["max_num_seqs"])
            return llm.generate(case.prompts, case.params, use_tqdm=False)


def answers_of_torch(case: Case, directory: Path) -> list[RequestOutput]:
    """The same from plain torch."""
    options = {"device": "cpu", "attention_backend": "sdpa", **case.options}
    with short_calibration(), LLM(directory, **options) as llm:
        return llm.generate(case.prompts, case.params, use_tqdm=False)


def _in_one_thread(run: Any, jobs: Any, device: torch.device, num_threads: int) -> None:
    run(jobs, device, 1)  # the interpreter has one state


def compare(
    case: Case, ours: list[RequestOutput], theirs: list[RequestOutput]
) -> tuple[float, int]:
    """Assert that answers agree up to where they may part.

    Returns:
        the largest difference of log-probabilities
        how many were compared
    """
    limit, mean_limit = 2e-3, 1e-3
    if case.is_rounded:
        # In fp8 one rounding that falls the other way goes on into all that follow, and random
        # weights may make logits that lie far apart.
        prompts = (output.prompt_logprobs or [None] for output in theirs)
        values = [x.logprob for prompt in prompts for d in prompt if d for x in d.values()]
        spread = pstdev(values) if values else 0.0
        limit, mean_limit = max(4.0, 0.3 * spread), max(0.3, 0.05 * spread)
    found: list[float] = []

    def agree(mine: Any, other: Any, what: str) -> bool:
        """Whether the next position may be compared too."""
        (my_id, my_value), (other_id, other_value) = mine, other
        assert my_value == my_value, f"{what} is NaN"
        assert 0 <= my_id < VOCAB_SIZE
        if my_id != other_id:
            return False
        found.append(abs(my_value - other_value))
        assert found[-1] <= limit, f"{what}: {my_value} and {other_value}"
        return True

    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for position in range(1, len(case.prompts[place]) if mine.prompt_logprobs else 0):
            token_id = case.prompts[place][position]
            pair = [x.prompt_logprobs[position][token_id].logprob for x in (mine, other)]
            agree((token_id, pair[0]), (token_id, pair[1]), f"prompt {place}, token {position}")
        (my_answer,), (other_answer,) = mine.outputs, other.outputs
        is_greedy = case.params[place].temperature == 0
        for step in range(len(my_answer.token_ids)):
            if step == len(other_answer.token_ids):
                break
            pairs = [
                (answer.token_ids[step], answer.logprobs[step][answer.token_ids[step]].logprob)
                for answer in (my_answer, other_answer)
            ]
            if not agree(*pairs, f"answer {place}, step {step}"):
                if is_greedy:  # of two equally likely
                    assert abs(pairs[0][1] - pairs[1][1]) <= limit, f"answer {place}: {pairs}"
                break
    assert not found or sum(found) <= mean_limit * len(found)
    return max(found, default=0.0), len(found)
