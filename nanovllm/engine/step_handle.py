"""The drawn tokens on their way from the device to the host."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from nanovllm.engine.step import StepOutput

_NUM_BUFFERS = 3  # a buffer is written again two steps later, when its step has been waited for


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    token_ids: torch.Tensor  # [num_sampled] int32, on the host; valid after `ready`
    ready: torch.cuda.Event | None

    def is_ready_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the step; False if it is not done by then."""
        deadline = time.perf_counter() + timeout_s
        while self.ready is not None and not self.ready.query():
            if time.perf_counter() > deadline:
                return False
            time.sleep(20e-6)
        return True

    def wait(self) -> StepOutput:
        if self.ready is not None:
            self.ready.synchronize()
        return StepOutput(self.token_ids.numpy().copy())


class OutputBuffers:
    """Owns pinned host buffers that drawn tokens are copied into, behind the step in stream order."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        size = (_NUM_BUFFERS, max_num_seqs)
        self._buffers = torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)
        self._events = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)] if self._is_cuda else []
        self._turn = 0

    def send(self, token_ids: torch.Tensor) -> StepHandle:
        """Start the copy of `token_ids`, [num_sampled] int32 on the device."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        target = self._buffers[self._turn, : len(token_ids)]
        target.copy_(token_ids, non_blocking=self._is_cuda)
        if not self._is_cuda:
            return StepHandle(target, None)
        event = self._events[self._turn]
        event.record()
        return StepHandle(target, event)
