"""What one call of a DataParallelLLM has open."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanovllm.frontend.output_processor import Request


@dataclass(slots=True)
class Open:
    """A request that has no output yet."""

    index: int
    request: Request
    seed: int
    num_deaths: int = 0


@dataclass(slots=True)
class Job:
    """What waits for an engine, and what is open in all."""

    waiting: deque[Open] = field(default_factory=deque)
    open: dict[str, Open] = field(default_factory=dict)
