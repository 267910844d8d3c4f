"""Capture decode steps as CUDA graphs, one a batch size, and replay the smallest that fits."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from functools import cache

import torch

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where a padded row costs most, up to the cap itself."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max_num_seqs + 1, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Owns the captured graphs; a size is captured when it is first needed."""

    def __init__(self, *, max_num_seqs: int, device: torch.device) -> None:
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._device = device
        # One pool for all: graphs run one after another, and nothing outlives a replay in it.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def padded_size(self, num_rows: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def has(self, num_rows: int) -> bool:
        return self.padded_size(num_rows) in self._graphs

    def capture(self, num_rows: int, step: Callable[[int], None]) -> None:
        """Capture `step`, which launches a whole decode step over static tensors.

        With no live row, as the caller sees to, a step changes nothing: it runs so once before, to
        load every kernel.
        """
        size = self.padded_size(num_rows)
        started = time.perf_counter()
        main_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            step(size)
            # Not `torch.cuda.graph`: that waits for the device and collects garbage first, while
            # other steps may be running. "thread_local": the process's other threads go on.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step(size)
            finally:
                graph.capture_end()
        main_stream.wait_stream(self._stream)
        self._graphs[size] = graph
        logger.debug("Captured decode graph %d in %.3f s", size, time.perf_counter() - started)

    def replay(self, num_rows: int) -> None:
        self._graphs[self.padded_size(num_rows)].replay()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a process: cuBLAS keeps memory for every stream that it meets."""
    return torch.cuda.Stream(device)
