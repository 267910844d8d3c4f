"""Requests of several engines: made for the smallest of them, and what of one call is open."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanovllm.data_parallel.engine_process import EngineFacts, RunItem
from nanovllm.frontend.output_processor import Request
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


@dataclass(slots=True)
class Open:
    """A request that has no output yet."""

    index: int
    request: Request
    seed: int
    num_deaths: int = 0

    def run_item(self) -> RunItem:
        """The request as it goes to an engine."""
        request = self.request
        ids, params = request.prompt_token_ids, request.params
        return RunItem(request.request_id, request.prompt, ids, params, self.seed)


@dataclass(slots=True)
class Job:
    """What waits for an engine, and what is open in all."""

    waiting: deque[Open] = field(default_factory=deque)
    open: dict[str, Open] = field(default_factory=dict)
