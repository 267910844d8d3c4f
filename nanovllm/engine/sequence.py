"""One generation: its tokens, how far it has come, and what it may still do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"  # never run yet, or preempted: no row, no blocks
    RUNNING = "running"  # holds a row and blocks
    DRAINING = "draining"  # reached its length; gave row and blocks back, last token on its way
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One of a request's n generations. Written by the Scheduler (`block_table`: BlockManager).

    There is no prefill or decode state: a step computes some tokens that are not computed yet.
    """

    seq_id: int
    request_id: str
    token_ids: list[int]  # prompt and generated tokens whose values have reached the host
    params: SamplingParams
    max_num_tokens: int  # prompt and output together
    noise_key: tuple[int, int]
    sample_index: int = 0  # which of the request's n
    is_watched: bool = False  # a stop string, stream or logprobs want every token as it comes
    barred_until_min_len: tuple[int, ...] = ()  # stop ids that `min_tokens` holds back
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs_from: int = 1  # first prompt position that `prompt_logprobs` are wanted of
    num_prompt_tokens: int = 0
    # By prefill: their KV is in the cache, or will be when the launched steps are done. What decode
    # steps add is counted in the RowTable's columns alone.
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix hits of the first admission
    num_expected_tokens: int = 0  # when it last left a row, with the one a step was drawing
    block_table: list[int] = field(default_factory=list)
    num_indexed_blocks: int = 0  # leading blocks that went through the prefix index
    row: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.num_expected_tokens = len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first of n samples computes them for all."""
        return self.params.prompt_logprobs is not None and self.sample_index == 0

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens of which K and V are enough, since nobody looks at what follows them."""
        # The last token's forward pass gives the logits to sample from.
        num_tokens = len(self.token_ids) - 1
        if not self.wants_prompt_logprobs:
            return num_tokens
        return min(num_tokens, self.prompt_logprobs_from - 1)

    @property
    def has_token_in_flight(self) -> bool:
        return len(self.token_ids) < self.num_expected_tokens

    def restart(self) -> None:
        """Back to waiting, in whatever state a fault left it. For a scheduler that is new.

        Whether the last token was looked at for an end is not known, so it is drawn again, which
        gives the same one.
        """
        if self.status is not SequenceStatus.WAITING:
            self.num_preemptions += 1
        del self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - 1) :]
        self.num_computed_tokens = self.num_indexed_blocks = 0
        self.num_expected_tokens = len(self.token_ids)
        self.block_table, self.row = [], -1
        self.status, self.finish_reason, self.stop_reason = SequenceStatus.WAITING, None, None
