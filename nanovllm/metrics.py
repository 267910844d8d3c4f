"""Counters of an engine's life."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.outputs import RequestOutput


@dataclass(slots=True)
class Metrics:
    """Owns the counters. Written by the LLMEngine."""

    num_requests: int = 0
    num_finished_requests: int = 0
    num_prompt_tokens: int = 0  # of finished requests
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_output_tokens: int = 0
    num_computed_prompt_tokens: int = 0  # forward-passed in prefill steps, repeated work included
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_decode_rows: int = 0
    num_preemptions: int = 0
    schedule_s: float = 0.0  # host time to put steps together
    launch_s: float = 0.0  # host time to launch them
    wait_s: float = 0.0  # waiting for tokens: the device is the bottleneck
    update_s: float = 0.0  # host time to bring tokens in and make outputs

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def count_step(self, num_prefill_tokens: int, num_decode_rows: int) -> None:
        if num_decode_rows:
            self.num_decode_steps += 1
            self.num_decode_rows += num_decode_rows
        else:
            self.num_prefill_steps += 1
            self.num_computed_prompt_tokens += num_prefill_tokens

    def count_finished(self, output: RequestOutput) -> None:
        self.num_finished_requests += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens


class Stopwatch:
    """Splits time into phases: each `lap` gives the seconds since the last."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed
