"""How requests are made for several engines: numbered once, and checked against the smallest."""

from __future__ import annotations

from nanovllm.data_parallel.engine_process import EngineFacts
from nanovllm.frontend.request_builder import Limits, RequestBuilder
from nanovllm.frontend.start_up import ModelFiles


def make_builder(files: ModelFiles, facts: list[EngineFacts], seed: int) -> RequestBuilder:
    """The builder of requests that any of the engines can take."""
    limits = Limits(
        min(item.max_model_len for item in facts),
        min(item.num_cache_tokens for item in facts),
        files.model_config.vocab_size,
        allows_processors=False,
    )
    return RequestBuilder(
        files.tokenizer, limits, files.eos_ids, seed, is_taken=lambda request_id: False
    )
