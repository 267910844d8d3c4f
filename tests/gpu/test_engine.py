"""The engine on CUDA: every backend, graphs and eager, overlap, preemption; the demo model sums."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from oracle import Oracle
from tiny_models import write_tiny, write_tiny_qwen3

import bench
from nanovllm import LLM, SamplingParams
from nanovllm.fused import FusedLayers

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=8)
needs_flash_attn = pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn")


@pytest.fixture(scope="module")
def sums(demo_model):
    """(prompt, answer) of sums that the demo model has not seen in training."""
    pairs = json.loads((demo_model / "arithmetic_pairs.json").read_text())
    (name,) = set(pairs) - {"train"}
    return [(f"{a}{op}{b}=", str(a + b if op == "+" else a - b)) for a, op, b in pairs[name]]


def share_right(llm: LLM, sums: list[tuple[str, str]]) -> float:
    outputs = llm.generate([prompt for prompt, _ in sums], GREEDY, use_tqdm=False)
    right = [out["text"] == answer for out, (_, answer) in zip(outputs, sums, strict=True)]
    return sum(right) / len(right)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "triton"},
        {"attention_backend": "triton", "enforce_eager": True},
        {"attention_backend": "sdpa"},
        pytest.param({"attention_backend": "flash_attn"}, marks=needs_flash_attn),
        pytest.param(
            {"attention_backend": "flash_attn", "kvcache_block_size": 256}, marks=needs_flash_attn
        ),
        {"enable_overlap": False},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"max_num_seqs": 100, "max_num_batched_tokens": 150},
        {"num_kvcache_blocks": 9, "kvcache_block_size": 16},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "attention_backend": "sdpa"},
        {"kv_cache_dtype": "fp8", "dtype": "float16", "max_num_seqs": 100, "enforce_eager": True},
    ],
    ids=str,
)
def test_held_out_sums_are_right(demo_model, sums, options):
    with LLM(demo_model, **{"num_kvcache_blocks": 2048, **options}) as llm:
        assert share_right(llm, sums) >= (0.97 if "kv_cache_dtype" in options else 0.99)
        # A smaller batch after a larger one: padding rows of a graph must not read old rows.
        assert share_right(llm, sums[:21]) >= 0.95
        blocks = llm._engine.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True, "attention_backend": "sdpa"},
        {"num_kvcache_blocks": 12, "max_num_batched_tokens": 33},
        {"max_num_seqs": 3, "enable_overlap": False},
    ],
    ids=str,
)
def test_float32_equals_the_oracle_on_the_cpu(tmp_path, optimistic, options):
    model = write_tiny_qwen3(tmp_path / "model", head_dim=32)
    oracle = Oracle(model)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 15, 16, 17, 40, 70, 33]
    prompts = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in lengths]
    prompts += [prompts[4] + [7], prompts[4]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    defaults = {"dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 256}
    with LLM(model, **{**defaults, **options}) as llm:
        for _ in range(2):  # the second time from the prefix cache
            for prompt, output in zip(prompts, llm.generate(prompts, params, False), strict=True):
                # TF32 is off, but sums run in another order than on the CPU.
                oracle.check_greedy(prompt, output["token_ids"], margin=1e-3)
        assert (llm.metrics.num_preemptions > 0) == ("num_kvcache_blocks" in options)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_experts_in_float32_equal_the_oracle_on_the_cpu(tmp_path, enforce_eager):
    """Batches of 9 run in a graph of 16, whose other rows ask for experts too."""
    fields = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 40}
    fields |= {"head_dim": 32, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    model = write_tiny(tmp_path / "model", "Qwen3MoeForCausalLM", norm_topk_prob=True, **fields)
    oracle = Oracle(model)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 15, 16, 17, 40, 70, 33, 3, 200]
    prompts = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = {"dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 256}
    with LLM(model, enforce_eager=enforce_eager, **options) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params, False), strict=True):
            oracle.check_greedy(prompt, output["token_ids"], margin=1e-3)


def test_a_seeded_request_draws_the_same_in_any_company(demo_model):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=24)
    with LLM(demo_model, dtype="float32", num_kvcache_blocks=512) as llm:
        (alone,) = llm.generate(["In the beginning"], params, use_tqdm=False)
        others = [f"{i}+{i}=" for i in range(40)]
        crowd = llm.generate([*others, "In the beginning"], params, use_tqdm=False)
        assert crowd[-1]["token_ids"] == alone["token_ids"]


def test_filters_and_logprobs_behind_the_graph(demo_model):
    """Rows that ask for more are redrawn from the graph's logits; others keep their tokens."""
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asking = plain.clone(logprobs=3, repetition_penalty=1.0001, top_k=5)
    sampled = SamplingParams(temperature=0.9, top_p=0.5, seed=3, max_tokens=12, logprobs=1)
    with LLM(demo_model, dtype="float32", num_kvcache_blocks=512) as llm:
        expected = llm.generate(["And he said"], plain, use_tqdm=False)[0]["token_ids"]
        mixed = llm.generate(["And he said"] * 3, [plain, asking, sampled], use_tqdm=False)
        assert mixed[0]["token_ids"] == mixed[1]["token_ids"] == expected
        for output in mixed[1:]:
            completion = output.outputs[0]
            assert len(completion.logprobs) == len(completion.token_ids)
            for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
                assert token_id in position


def test_bfloat16_logits_are_as_close_to_float32_as_transformers_own(demo_model):
    """Largest and mean difference at most 1.5 times those of transformers in bfloat16."""
    from transformers import AutoModelForCausalLM

    text = (demo_model / "tokenizer_config.json").read_text() * 4
    with LLM(demo_model, num_kvcache_blocks=512) as llm:
        ids = llm.get_tokenizer()(text)["input_ids"][:1000]
        params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
        output = llm.generate([ids], params, use_tqdm=False)[0]
    ours = torch.zeros(len(ids) - 1, 4096)
    for row, position in enumerate(output.prompt_logprobs[1:]):
        ours[row, list(position)] = torch.tensor([entry.logprob for entry in position.values()])
    reference = {}
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=dtype).to(device)
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=device)).logits[0, :-1].float().cpu()
        reference[dtype] = logits.log_softmax(dim=-1)
    exact = reference[torch.float32]
    theirs = (reference[torch.bfloat16] - exact).abs()
    mine = (ours - exact).abs()
    assert mine.mean() <= 1.5 * theirs.mean() and mine.max() <= 1.5 * theirs.max()


@pytest.mark.parametrize("num_seqs", [16, 20])  # layers of five kernels, and of seven
def test_decode_logits_of_a_model_of_real_size(tmp_path, num_seqs):
    """2,000 decode positions of captured graphs: at most 1.5 times transformers' own bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(bench.write_config("0.6B", tmp_path))
    torch.manual_seed(0)
    with torch.device("cuda"):
        drawn = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    drawn.save_pretrained(tmp_path)
    num_prompt, num_steps = 300, 2000 // num_seqs
    prompts = torch.randint(0, 150_000, (num_seqs, num_prompt))
    params = SamplingParams(max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True)
    ours = []
    with LLM(tmp_path, gpu_memory_utilization=0.3, enable_overlap=False) as llm:
        order = [llm.add_request(prompt, params) for prompt in prompts.tolist()]
        runner = llm._engine._executor._runner
        assert isinstance(runner._model.model.run, FusedLayers)
        outputs = []
        while len(outputs) < num_seqs:
            outputs += llm.step()
            ours.append(runner._logits[:num_seqs].float())
    outputs.sort(key=lambda output: order.index(output.request_id))
    ids = torch.tensor(
        [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    )
    ours = torch.stack(ours[-num_steps:], dim=1)  # of the tokens from the second on
    assert ours.shape == (num_seqs, num_steps, config.vocab_size)
    differences = {"mine": [], "theirs": []}
    exact_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to("cuda")
    with torch.inference_mode():
        for row, mine in zip(ids.to("cuda"), ours, strict=True):
            exact, theirs = (
                model(row[None, :-1]).logits[0, num_prompt:].float()
                for model in (exact_model, drawn)
            )
            differences["mine"].append((mine - exact).abs())
            differences["theirs"].append((theirs - exact).abs())
    mine, theirs = (torch.stack(parts) for parts in differences.values())
    print(f"mean {mine.mean():.4f} {theirs.mean():.4f}, max {mine.max():.4f} {theirs.max():.4f}")
    assert mine.mean() <= 1.5 * theirs.mean() and mine.max() <= 1.5 * theirs.max()


def test_an_fp8_cache_holds_more_tokens_and_graphs_give_what_eager_gives(demo_model):
    prompts = [f"{10 + i}+{40 - i}=" for i in range(21)]
    counts, answers = [], []
    fp8 = {"kv_cache_dtype": "fp8"}
    for options in ({}, fp8, {**fp8, "enforce_eager": True}):
        with LLM(demo_model, dtype="float32", gpu_memory_utilization=0.3, **options) as llm:
            counts.append(llm._engine.scheduler.blocks.num_blocks)
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            answers.append([output["token_ids"] for output in outputs])
    assert 3.9 < counts[1] / counts[0] < 4.1, "of float32"
    assert answers[1] == answers[2]
