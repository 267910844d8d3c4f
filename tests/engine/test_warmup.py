"""Start-up's blank steps stay within what the rows and the cache hold."""

import pytest
import torch

from nanovllm.engine import model_runner, warmup
from nanovllm.kernels._triton import HAS_TRITON


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter's check of accesses")
def test_kernels_are_compiled_within_the_block_tables(make_llm, demo_model, monkeypatch):
    """A prompt longer than max_model_len read block ids behind its row: any, so any address."""

    def in_one_thread(jobs, device, num_threads):  # the interpreter has one state
        warmup.run_in_threads(jobs, device, 1)

    monkeypatch.setattr(model_runner, "run_in_threads", in_one_thread)
    llm = make_llm(
        demo_model, device="cpu", dtype="float32", attention_backend="triton", max_model_len=64,
        kvcache_block_size=16, num_kvcache_blocks=8, max_num_seqs=1,
    )  # fmt: skip
    # conftest has the interpreter check every access.
    llm._engine._executor._runner._compile_kernels()
