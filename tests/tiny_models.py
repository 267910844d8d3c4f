"""Tiny random models on disk: config.json, safetensors and a tokenizer, like real checkpoints."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a tiny tokenizer for tests",
    "one two three four five six seven eight nine ten",
]


def write_tiny_qwen3(
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random Qwen3 and return its directory; `overrides` are fields of Qwen3Config.

    Its logits are wide (a standard deviation of several units), so that greedy tokens vary and the
    best one leads by far more than the noise of float32. `max_shard_size="100KB"` writes many
    shards and an index. The model's vocabulary is larger than the tokenizer's.
    """
    directory = Path(directory)
    model = make_tiny_qwen3(seed=seed, dtype=dtype, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    return directory


def write_tiny(
    directory: str | Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """As `write_tiny_qwen3`, of another architecture; `head_dim` is absent unless given."""
    directory = Path(directory)
    make_tiny(architecture, seed=seed, dtype=dtype, **overrides).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def make_tiny_qwen3(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Qwen3ForCausalLM:
    """Make the model alone, in memory: the oracle of tests that need no files."""
    fields = {"head_dim": 32} | overrides
    return make_tiny("Qwen3ForCausalLM", seed=seed, dtype=dtype, **fields)


def make_tiny(
    architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """Make a tiny random model of any architecture that transformers has."""
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 517,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**(fields | overrides))
    model: PreTrainedModel = model_class(config).to(dtype).eval()
    # A generator of its own: the global one belongs to the tests.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1.0 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.3 * noise
            elif "embed_tokens" in name or "lm_head" in name:
                value = noise
            else:
                value = 3.0 * noise / parameter.shape[-1] ** 0.5  # layers outweigh the residual
            parameter.copy_(value)
    return model


def write_tokenizer(directory: str | Path) -> None:
    """Write a byte-level BPE tokenizer that round-trips any text, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
