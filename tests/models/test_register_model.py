"""How to add a model from outside the package: one class, and one call before `LLM` is made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import Oracle
from tiny_models import write_tiny

ROOT = Path(__file__).parents[2]
PROMPT, NUM_TOKENS = [5, 17, 300, 42, 8], 12

# config.json names the architecture in `architectures`; the checkpoint's tensors have Hugging Face
# names. The call stands at the top level, since ranks are processes that import the script anew.
SCRIPT = """
import json
import sys

from nanovllm import LLM, SamplingParams
from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.registry import register_model


class MyForCausalLM(DecoderForCausalLM):
    def attention_options(self, config):
        return AttentionOptions(qk_norm=False, qkv_bias=True, o_bias=False)


register_model("MyForCausalLM", MyForCausalLM)

if __name__ == "__main__":
    model, tp_size, prompt, num_tokens = sys.argv[1:]
    params = SamplingParams(temperature=0, max_tokens=int(num_tokens), ignore_eos=True)
    options = {"device": "cpu", "num_kvcache_blocks": 8, "kvcache_block_size": 16}
    with LLM(model, tensor_parallel_size=int(tp_size), **options) as llm:
        (output,) = llm.generate([json.loads(prompt)], params, use_tqdm=False)
        print(json.dumps(output["token_ids"]))
"""


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_model_from_outside_the_package_runs(tmp_path, tp_size):
    model = write_tiny(tmp_path / "model", "Qwen2ForCausalLM")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MyForCausalLM"]}))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(model), str(tp_size), json.dumps(PROMPT), str(NUM_TOKENS)]
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    tokens = json.loads(result.stdout.splitlines()[-1])
    assert len(tokens) == NUM_TOKENS
    Oracle(model).check_greedy(PROMPT, tokens)
