"""An engine's steps as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from nanovllm.metrics import StepSample

logger = logging.getLogger(__name__)

MAX_STEPS = 200_000  # 100 MB or so, what a viewer still opens


class TraceWriter:
    """Owns the trace file. `add_step` is an observer of steps; `close` makes the file whole."""

    def __init__(self, path: Path, start_s: float, *, max_steps: int = MAX_STEPS) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._start_s = start_s
        self._max_steps = max_steps
        self._num_steps = 0
        self._is_first = True
        self._engines: set[int] = set()

    def add_step(self, sample: StepSample) -> None:
        """Write one step: its phases on a track of the engine, its load as counters."""
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            if self._num_steps == self._max_steps + 1:
                logger.warning("The trace ends after %d steps.", self._max_steps)
            return
        if sample.engine not in self._engines:
            self._engines.add(sample.engine)
            self._name_tracks(sample.engine)
        kind = "decode" if sample.num_decode_rows else "prefill"
        phases = {
            "schedule": sample.schedule_s,
            "launch": sample.launch_s,
            "wait": sample.wait_s,
            "update": sample.update_s,
        }
        start = sample.end_s - self._start_s - sum(phases.values())
        arguments = {
            "prefill tokens": sample.num_prefill_tokens,
            "decode rows": sample.num_decode_rows,
            "tokens out": sample.num_output_tokens,
            "preemptions": sample.num_preemptions,
        }
        self._slice(kind, sample.engine, 0, start, sum(phases.values()), arguments)
        for name, seconds in phases.items():
            self._slice(name, sample.engine, 1, start, seconds, {})
            start += seconds
        counters: dict[str, dict[str, float]] = {
            "sequences": {"running": sample.num_running, "waiting": sample.num_waiting},
            "KV cache, %": {"used": round(100 * sample.kv_use, 2)},
        }
        for name, values in counters.items():
            self._write(
                {"name": name, "ph": "C", "pid": sample.engine, "ts": _us(start), "args": values}
            )

    def close(self) -> None:
        """End the file. A second call does nothing."""
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def _slice(
        self,
        name: str,
        engine: int,
        track: int,
        start: float,
        seconds: float,
        arguments: dict[str, Any],
    ) -> None:
        event = {"name": name, "ph": "X", "pid": engine, "tid": track}
        self._write({**event, "ts": _us(start), "dur": _us(seconds), "args": arguments})

    def _name_tracks(self, engine: int) -> None:
        names = [("process_name", 0, f"engine {engine}"), ("thread_name", 0, "steps")]
        for kind, track, name in [*names, ("thread_name", 1, "phases of the host")]:
            self._write(
                {"name": kind, "ph": "M", "pid": engine, "tid": track, "args": {"name": name}}
            )

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False


def _us(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e6, 1)
