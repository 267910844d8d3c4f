"""A LoRA adapter is merged on the GPU: the weights that the CPU makes, also after `wake_up`."""

from __future__ import annotations

import pytest
import torch
from lora_adapters import write_adapter

from nanovllm import SamplingParams
from nanovllm.lora.merge import merged
from nanovllm.utils.loader import iterate_safetensors

pytestmark = pytest.mark.gpu
NAME = "model.layers.0.mlp.down_proj.weight"


def test_the_gpu_merges_what_the_cpu_merges(tmp_path, demo_model, make_llm):
    adapter = write_adapter(tmp_path / "adapter", demo_model)
    on_cpu = dict(merged(iterate_safetensors(demo_model), adapter, torch.device("cpu")))
    llm = make_llm(demo_model, device="cuda", lora=adapter, num_kvcache_blocks=64)
    weight = llm._engine._executor._runner._model.get_parameter(NAME)
    expected = on_cpu[NAME].to(weight.dtype)
    # float32 sums differ in the last bit, which rarely is what decides the rounding to bfloat16.
    share = (weight.cpu() == expected).float().mean()
    print(f"equal after rounding to {weight.dtype}: {share:.5f}")
    assert weight.dtype == torch.bfloat16 and share > 0.999
    torch.testing.assert_close(weight.cpu(), expected, rtol=2**-7, atol=1e-6)

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (before,) = llm.generate(["12+34="], params, use_tqdm=False)
    kept = weight.clone()
    llm.sleep(2)
    llm.wake_up()
    assert torch.equal(weight, kept)
    (after,) = llm.generate(["12+34="], params, use_tqdm=False)
    assert after["token_ids"] == before["token_ids"]
