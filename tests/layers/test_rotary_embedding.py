"""Rotary tables against transformers, bit for bit."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm.layers.rotary_embedding import rope_table
from nanovllm.models.rope_config import read_rope

THETA = 1e6
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 8.0},
        LLAMA3,
        YARN,
        YARN | {"factor": 1.0},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 1.0},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.5},
        YARN | {"mscale": 0.0, "mscale_all_dim": 1.5},
        YARN | {"truncate": False},
        YARN | {"beta_fast": 4, "beta_slow": 4},
        YARN | {"original_max_position_embeddings": 4},
    ],
    ids=str,
)
def test_table_equals_transformers(scaling, head_dim):
    max_positions = 40960
    fields = {"rope_parameters": {"rope_theta": THETA, **scaling}}
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_positions, **fields)
    positions = torch.tensor([[0, 1, 2, 100, 8191, 32767, max_positions - 1]])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)

    fields = {"rope_parameters": {"rope_theta": THETA, **scaling}}
    theta, ours = read_rope(fields, max_positions)
    table = rope_table(head_dim, theta, ours, max_positions, device=torch.device("cpu"))

    assert table.shape == (max_positions, head_dim)
    assert table.dtype == torch.float32
    rows = table[positions[0]]
    half = head_dim // 2
    # One part in a million: vectorised cosines may differ in the last bit with the layout.
    torch.testing.assert_close(rows[:, :half], cos[0, :, :half], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows[:, half:], sin[0, :, :half], rtol=1e-6, atol=1e-6)
