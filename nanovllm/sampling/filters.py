"""Rules that change logits before a token is drawn, one function a rule.

`min_p`, `top_k` and `top_p` are in `keep_top`, penalties in `penalties`. All work in
place on float32 logits. Variable-length rules come as coordinates: row and token id of each entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanovllm.sampling_params import GREEDY_TEMPERATURE

_BARRED = float("-inf")


def allow_only(
    logits: torch.Tensor, allowed_rows: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Bar all but the allowed tokens of some rows, in place.

    logits: [n, vocab_size]; allowed_rows: [num_allowed_rows], the rows that have such a rule; rows,
    token_ids: [num_entries], each allowed token
    """
    kept = logits[rows, token_ids]
    logits.index_fill_(0, allowed_rows, _BARRED)
    logits[rows, token_ids] = kept


def bar(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, is_barred: torch.Tensor
) -> None:
    """Bar each token whose condition holds, in place; a token may come several times in a row.

    logits: [n, vocab_size], contiguous; rows, token_ids, is_barred (bool): [num_entries]
    """
    # Not an assignment: of entries that repeat, one that holds must win.
    limits = torch.where(is_barred, _BARRED, -_BARRED)
    places = rows * logits.shape[1] + token_ids
    logits.view(-1).scatter_reduce_(0, places, limits, "amin")


def ends_with(history: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    """Whether each history ends with its run, [num_runs] bool.

    history: [num_runs, length] last tokens, the latest last; runs: [num_runs, length], to the
    right, -1 in front of shorter ones
    """
    return ((runs < 0) | (runs == history)).all(dim=1)


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> None:
    """Add a number to the logits of some tokens, each at most once in a row, in place.

    logits: [n, vocab_size]; rows, token_ids, values: [num_entries]
    """
    logits[rows, token_ids] += values


def apply_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Divide each row by its temperature, greedy rows by 1; a new tensor.

    logits: [n, vocab_size], temperatures: [n]
    """
    divisors = torch.where(temperatures < GREEDY_TEMPERATURE, 1.0, temperatures)
    return logits / divisors.unsqueeze(1)


def run_processors(
    row: torch.Tensor,
    processors: Sequence[Callable[..., Any]],
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> None:
    """Let Python functions change one row of logits, one after another, in place.

    row: [vocab_size] float32. A function of three parameters is called with (prompt ids, output
    ids, logits), another one with (output ids, logits), and returns logits of the same shape.
    """
    for processor in processors:
        ids = [list(output_token_ids)]
        if _num_parameters(processor) == 3:
            ids.insert(0, list(prompt_token_ids))
        result = processor(*ids, row.clone())
        if not isinstance(result, torch.Tensor) or result.shape != row.shape:
            got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise TypeError(
                f"The logits processor {processor!r} must return the logits, a tensor of shape "
                f"{tuple(row.shape)}, got {got}."
            )
        row.copy_(result)
        if not bool((row > _BARRED).any()):  # NaN is not larger either
            raise ValueError(
                f"The logits processor {processor!r} left no token to draw: all its logits are "
                f"-inf or NaN after {len(output_token_ids)} token(s). Leave one finite, or abort "
                "the request."
            )


def _num_parameters(processor: Callable[..., Any]) -> int:
    try:
        return len(inspect.signature(processor).parameters)
    except ValueError:  # built-in functions may have no signature
        return 2
