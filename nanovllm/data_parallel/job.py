"""What one call of a DataParallelLLM has open."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanovllm.data_parallel.engine_process import RunItem
from nanovllm.frontend.output_processor import Request


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
