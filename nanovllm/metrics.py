"""Counters of an engine's life."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
        """All counters by name."""
        return asdict(self)

    def count_step(self, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """Count a step that was launched: a prefill, or a decode where there are rows."""
        if num_decode_rows:
            self.num_decode_steps += 1
            self.num_decode_rows += num_decode_rows
        else:
            self.num_prefill_steps += 1
            self.num_computed_prompt_tokens += num_prefill_tokens

    def count_finished(self, output: RequestOutput) -> None:
        """Count a request whose final output this is."""
        self.num_finished_requests += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens


@dataclass(frozen=True, slots=True)
class StepSample:
    """What one step of one engine did, and how full the engine was after it."""

    end_s: float  # as time.time() gives it
    schedule_s: float
    launch_s: float
    wait_s: float
    update_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    num_output_tokens: int
    num_prompt_tokens: int  # of requests that it finished
    num_cached_tokens: int  # of those
    num_preemptions: int
    num_running: int
    num_waiting: int
    kv_use: float  # share of the KV cache's blocks, 0 to 1
    engine: int = 0  # which of several data-parallel ones


class StepSampler:
    """Turns the counters after each step into what that step added to them."""

    def __init__(self, metrics: Metrics, sink: Callable[[StepSample], None]) -> None:
        self._last = replace(metrics)
        self._sink = sink

    def __call__(self, metrics: Metrics, load: tuple[int, int, float]) -> None:
        last, self._last = self._last, replace(metrics)
        num_running, num_waiting, kv_use = load
        self._sink(
            StepSample(
                end_s=time.time(),
                schedule_s=metrics.schedule_s - last.schedule_s,
                launch_s=metrics.launch_s - last.launch_s,
                wait_s=metrics.wait_s - last.wait_s,
                update_s=metrics.update_s - last.update_s,
                num_prefill_tokens=(
                    metrics.num_computed_prompt_tokens - last.num_computed_prompt_tokens
                ),
                num_decode_rows=metrics.num_decode_rows - last.num_decode_rows,
                num_output_tokens=metrics.num_output_tokens - last.num_output_tokens,
                num_prompt_tokens=metrics.num_prompt_tokens - last.num_prompt_tokens,
                num_cached_tokens=metrics.num_cached_tokens - last.num_cached_tokens,
                num_preemptions=metrics.num_preemptions - last.num_preemptions,
                num_running=num_running,
                num_waiting=num_waiting,
                kv_use=kv_use,
            )
        )


class Stopwatch:
    """Splits time into phases: each `lap` gives the seconds since the last."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed
