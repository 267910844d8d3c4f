"""Two GPUs give what one gives, through NCCL and through memory shared between them; and they end.

Kill tests are last, each in the process of the others: what one leaves behind, the next one meets.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from tiny_models import write_tiny_qwen3

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
NCCL_ONLY = {"enable_custom_all_reduce": False}
SLACK = 256 * 2**20  # what the driver and NCCL's loaded kernels keep


@pytest.fixture(scope="module")
def sums(demo_model):
    """(prompt, answer) of sums that the demo model has not seen in training."""
    pairs = json.loads((demo_model / "arithmetic_pairs.json").read_text())
    (name,) = set(pairs) - {"train"}
    return [(f"{a}{op}{b}=", str(a + b if op == "+" else a - b)) for a, op, b in pairs[name]]


def two(model, **options):
    defaults = {"num_kvcache_blocks": 2048, "enable_custom_all_reduce": True}
    return LLM(model, tensor_parallel_size=2, **{**defaults, **options})


def share_right(llm, sums):
    outputs = llm.generate([prompt for prompt, _ in sums], GREEDY, use_tqdm=False)
    right = [out["text"] == answer for out, (_, answer) in zip(outputs, sums, strict=True)]
    return sum(right) / len(right)


def peers_of(llm):
    return llm._engine._executor._group.parallel.peers


def test_gpus_of_one_host_share_memory(demo_model, sums, caplog):
    """If not, the tests below cover NCCL alone: the log says why."""
    with caplog.at_level(logging.WARNING), two(demo_model) as llm:
        assert peers_of(llm) is not None, caplog.text
        assert share_right(llm, sums) >= 0.99


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        NCCL_ONLY,
        {**NCCL_ONLY, "enforce_eager": True, "enable_overlap": False},
        {"enable_overlap": False, "max_num_seqs": 100, "max_num_batched_tokens": 150},
    ],
    ids=str,
)
def test_held_out_sums_are_right(demo_model, sums, options):
    with two(demo_model, **options) as llm:
        assert share_right(llm, sums) >= 0.99
        assert share_right(llm, sums[:21]) >= 0.95
        assert (peers_of(llm) is None) == ("enable_custom_all_reduce" in options)
        blocks = llm._engine.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks


@pytest.mark.parametrize(
    ("num_kv_heads", "options"),
    [(1, {}), (2, {**NCCL_ONLY, "num_kvcache_blocks": 12, "max_num_batched_tokens": 33})],
    ids=str,
)
def test_float32_equals_the_oracle_on_the_cpu(tmp_path, optimistic, num_kv_heads, options):
    """Fewer kv heads than ranks, and as many; the vocabulary, 517, does not divide.

    With few blocks sequences are preempted.
    """
    model = write_tiny_qwen3(tmp_path / "model", num_key_value_heads=num_kv_heads)
    oracle = Oracle(model)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 15, 16, 17, 40, 70, 33]
    prompts = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in lengths]
    prompts += [prompts[4] + [7], prompts[4]]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    seeded = [greedy.clone(temperature=0.9, seed=n) for n in range(len(prompts))]
    seeded[2] = seeded[2].clone(top_k=5, logprobs=2)
    common = {"dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 256}
    with LLM(model, **common) as llm:
        expected = [out["token_ids"] for out in llm.generate(prompts, seeded, False)]
    with two(model, **{**common, **options}) as llm:
        for _ in range(2):  # the second time from the prefix cache
            for prompt, output in zip(prompts, llm.generate(prompts, greedy, False), strict=True):
                oracle.check_greedy(prompt, output["token_ids"], margin=1e-3)
        assert [out["token_ids"] for out in llm.generate(prompts, seeded, False)] == expected
        assert llm.metrics.num_cached_tokens > 0
        assert (llm.metrics.num_preemptions > 0) == ("num_kvcache_blocks" in options)


def test_bfloat16_logits_are_as_close_to_float32_as_those_of_one_gpu(demo_model):
    text = (demo_model / "tokenizer_config.json").read_text() * 4
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)

    def logprobs(**options):
        with LLM(demo_model, num_kvcache_blocks=512, **options) as llm:
            ids = llm.get_tokenizer()(text)["input_ids"][:600]
            output = llm.generate([ids], params, use_tqdm=False)[0]
        values = torch.zeros(len(ids) - 1, 4096)
        for row, position in enumerate(output.prompt_logprobs[1:]):
            values[row, list(position)] = torch.tensor([x.logprob for x in position.values()])
        return values

    exact = logprobs(dtype="float32")
    one = (logprobs() - exact).abs()
    both = (logprobs(tensor_parallel_size=2) - exact).abs()
    assert both.mean() <= 1.5 * one.mean() and both.max() <= 1.5 * one.max()


# ---- a rank that dies


def used():
    torch.cuda.synchronize()
    infos = [torch.cuda.mem_get_info(index) for index in range(2)]
    return [total - free for free, total in infos]


def wait_for_memory(before):
    """A killed process's memory comes back a moment later."""
    deadline = time.perf_counter() + 15
    while any(now - then > SLACK for now, then in zip(used(), before, strict=True)):
        assert time.perf_counter() < deadline, f"{used()} bytes in use, {before} before"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def before(demo_model):
    """Bytes in use on both GPUs with no engine, libraries loaded."""
    for options in ({}, NCCL_ONLY):
        with two(demo_model, **options) as llm:
            llm.generate("1+1=", GREEDY, use_tqdm=False)
    return used()


LONG = [[7 + n % 50] * 400 for n in range(400)]
WORK = {
    "prefill": (LONG, SamplingParams(temperature=0, max_tokens=1)),
    "decode": (LONG[:64], SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)),
}


@pytest.mark.parametrize("options", [{}, NCCL_ONLY], ids=str)
@pytest.mark.parametrize("when", ["idle", "prefill", "decode"])
def test_a_killed_worker_ends_the_call_and_leaves_nothing(
    demo_model, sums, before, when, options, capsys
):
    llm = two(demo_model, enable_prefix_caching=False, **options)
    (process,) = llm._engine._executor._group._processes
    pid = process.pid
    if when == "idle":
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
    prompts, params = WORK.get(when, (LONG[:1], GREEDY))
    killed_at = []

    def kill():
        killed_at.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    if when == "idle":
        killed_at.append(time.perf_counter())
    else:
        threading.Timer(1.5, kill).start()
    with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9"):
        while True:
            llm.generate(prompts, params, use_tqdm=False)
    raised_at = time.perf_counter()
    llm.close()
    closed_at = time.perf_counter()
    del llm
    with capsys.disabled():
        print(f" [raised {raised_at - killed_at[0]:.1f} s, closed {closed_at - raised_at:.1f} s]")
    assert raised_at - killed_at[0] < 30 and closed_at - raised_at < 30
    wait_for_memory(before)


def test_after_all_that_a_new_engine_works(demo_model, sums, before):
    with two(demo_model) as llm:
        assert share_right(llm, sums) >= 0.99
    wait_for_memory(before)


CTRL_C = """
import sys
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    for number in range(2):
        llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=512)
        print("up", flush=True)
        try:
            while number == 0:
                llm.generate([[5] * 20] * 40, params, use_tqdm=False)
        except KeyboardInterrupt:
            llm.close()
    print(llm.generate("12+34=", SamplingParams(temperature=0, max_tokens=4))[0]["text"])
    {last}
"""


@pytest.mark.parametrize("last", ["llm.close()", "sys.exit(0)"])
def test_ctrl_c_ends_the_call_and_a_new_engine_works(tmp_path, demo_model, last):
    """And an engine that nobody closes ends with its program."""
    script = tmp_path / "script.py"
    script.write_text(CTRL_C.format(last=last))
    process = subprocess.Popen(
        [sys.executable, str(script), str(demo_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONFAULTHANDLER": "1",
        },
    )
    try:
        assert process.stdout.readline() == "up\n"
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the worker gets it too
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # all say where they hang
        pytest.fail(process.communicate()[1][-6000:])
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    assert out.split() == ["up", "46"], err[-3000:]
