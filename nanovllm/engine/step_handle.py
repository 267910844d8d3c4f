"""What a step drew on its way from the device to the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.engine.step import LogprobColumns, StepOutput

_NUM_BUFFERS = 3  # a buffer is written again two steps later, when its step has been waited for


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of some positions: the token there first, then the k likeliest."""

    token_ids: torch.Tensor  # [num_positions, 1 + k] int32
    logprobs: torch.Tensor  # [num_positions, 1 + k] float32
    ranks: torch.Tensor  # [num_positions] int32, 1 is likeliest

    def to_host(self) -> TokenLogprobs:
        """Start the copy to pinned memory; it is done when the device has come that far."""
        return TokenLogprobs(*(_to_host(x) for x in (self.token_ids, self.logprobs, self.ranks)))


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of a step, piece by piece, on the host once the step is done."""

    sampled: list[TokenLogprobs] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)  # of `sampled` among the sampled rows
    prompt: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step. `wait` blocks until its tokens are on the host."""

    token_ids: torch.Tensor  # [num_sampled] int32, on the host; valid after `ready`
    ready: torch.cuda.Event | None
    logprobs: StepLogprobs  # valid after `ready` too

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
        token_ids = self.token_ids.numpy().copy()
        sampled = _columns(self.logprobs.sampled)
        if sampled is not None:
            places = np.concatenate(self.logprobs.places)
            sampled = _spread(sampled, places, len(token_ids))
        return StepOutput(token_ids, sampled, _columns(self.logprobs.prompt))


class OutputBuffers:
    """Owns pinned host buffers that take drawn tokens, behind the step in stream order."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        size = (_NUM_BUFFERS, max_num_seqs)
        self._buffers = list(torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda))
        self._events = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)] if self._is_cuda else []
        self._turn = 0

    def send(self, token_ids: torch.Tensor, logprobs: StepLogprobs) -> StepHandle:
        """Start the copy of `token_ids`, [num_sampled] int32; that of `logprobs` has started."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        target = self._buffers[self._turn][: len(token_ids)]
        target.copy_(token_ids, non_blocking=self._is_cuda)
        if not self._is_cuda:
            return StepHandle(target, None, logprobs)
        event = self._events[self._turn]
        event.record()
        return StepHandle(target, event, logprobs)


def _columns(parts: list[TokenLogprobs]) -> LogprobColumns | None:
    if not parts:
        return None
    return LogprobColumns(
        np.concatenate([part.token_ids.numpy() for part in parts]),
        np.concatenate([part.logprobs.numpy() for part in parts]),
        np.concatenate([part.ranks.numpy() for part in parts]),
    )


def _spread(columns: LogprobColumns, places: np.ndarray, num_sampled: int) -> LogprobColumns:
    """One position a sampled row, zeros where no logprobs were asked for."""
    if len(places) == num_sampled:
        return columns
    spread = []
    for values in (columns.token_ids, columns.logprobs, columns.ranks):
        all_values = np.zeros((num_sampled, *values.shape[1:]), dtype=values.dtype)
        all_values[places] = values
        spread.append(all_values)
    return LogprobColumns(*spread)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
