"""What a run looked like over time, in a bounded number of buckets however long it takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nanovllm.metrics import StepSample

MAX_BUCKETS = 240
_FIRST_WIDTH_S = 0.5
_PHASES = ("schedule", "launch", "wait", "update")


@dataclass(slots=True)
class Bucket:
    """Sums over one span of time; of a step that crosses its edge, the share that lies inside."""

    num_prefill_tokens: float = 0.0
    num_output_tokens: float = 0.0
    num_prompt_tokens: float = 0.0
    num_cached_tokens: float = 0.0
    # engine -> (seconds of its steps, and its load integrated over them)
    loads: dict[int, list[float]] = field(default_factory=dict)

    def add(self, other: Bucket) -> None:
        """Take in the bucket that follows."""
        self.num_prefill_tokens += other.num_prefill_tokens
        self.num_output_tokens += other.num_output_tokens
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens
        for engine, load in other.loads.items():
            mine = self.loads.setdefault(engine, [0.0, 0.0, 0.0, 0.0])
            self.loads[engine] = [a + b for a, b in zip(mine, load, strict=True)]

    def load(self) -> tuple[float, float, float]:
        """Mean sequences running and waiting, summed over engines; mean KV use, over engines."""
        means = [
            (running / time, waiting / time, kv / time)
            for time, running, waiting, kv in self.loads.values()
            if time > 0
        ]
        if not means:
            return 0.0, 0.0, 0.0
        running, waiting, kv = (sum(column) for column in zip(*means, strict=True))
        return running, waiting, kv / len(means)


class Timeline:
    """Owns the buckets and the histograms of a run. `add_step` is an observer of steps."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.width_s = _FIRST_WIDTH_S
        self.buckets: list[Bucket] = []
        self.phases = dict.fromkeys(_PHASES, 0.0)  # seconds, all engines together
        self.num_steps = 0
        self.num_preemptions = 0
        self.engines: set[int] = set()
        self.prompt_lengths: Counter[int] = Counter()
        self.output_lengths: Counter[int] = Counter()

    def add_step(self, sample: StepSample) -> None:
        """Take in one step."""
        seconds = [getattr(sample, f"{name}_s") for name in _PHASES]
        for name, value in zip(_PHASES, seconds, strict=True):
            self.phases[name] += value
        self.num_steps += 1
        self.num_preemptions += sample.num_preemptions
        self.engines.add(sample.engine)
        end = max(sample.end_s - self.start_s, 0.0)
        self._spread(sample, max(end - sum(seconds), 0.0), end)

    def add_request(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Take in the lengths of a finished request."""
        # Two digits are all that a histogram shows; exact counts of long texts would pile up.
        self.prompt_lengths[_two_digits(num_prompt_tokens)] += 1
        self.output_lengths[_two_digits(num_output_tokens)] += 1

    def _spread(self, sample: StepSample, start: float, end: float) -> None:
        self._make_room(end)
        first, last = int(start / self.width_s), int(end / self.width_s)
        for place in range(first, last + 1):
            inside = min(end, (place + 1) * self.width_s) - max(start, place * self.width_s)
            share = 1.0 if first == last else inside / (end - start)
            bucket = self.buckets[place]
            bucket.num_prefill_tokens += share * sample.num_prefill_tokens
            bucket.num_output_tokens += share * sample.num_output_tokens
            bucket.num_prompt_tokens += share * sample.num_prompt_tokens
            bucket.num_cached_tokens += share * sample.num_cached_tokens
            load = bucket.loads.setdefault(sample.engine, [0.0, 0.0, 0.0, 0.0])
            weight = max(inside, 1e-9)
            for column, value in enumerate(
                (1.0, sample.num_running, sample.num_waiting, sample.kv_use)
            ):
                load[column] += weight * value

    def _make_room(self, end: float) -> None:
        while end >= MAX_BUCKETS * self.width_s:
            pairs = self.buckets[::2]
            for kept, merged in zip(pairs, self.buckets[1::2], strict=False):
                kept.add(merged)
            self.buckets = pairs
            self.width_s *= 2
        while len(self.buckets) <= int(end / self.width_s):
            self.buckets.append(Bucket())


def _two_digits(number: int) -> int:
    digits = max(len(str(number)) - 2, 0)
    unit: int = 10**digits
    return number // unit * unit
