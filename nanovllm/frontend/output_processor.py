"""Text as it comes, stop strings, and the n generations of a request put together.

Only sequences with a stop string or a stream pay for text before they end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.scheduler import SequenceUpdates
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import StepOutput
from nanovllm.frontend.logprobs import SequenceLogprobs
from nanovllm.frontend.text import IncrementalText, decode_options, find_stop, special_tokens
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Request:
    """What a user asked for, and what has come of it. Written by the OutputProcessor."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seqs: list[Sequence]
    is_streamed: bool = False
    texts: dict[int, IncrementalText] = field(default_factory=dict)  # by sample, where needed
    logprobs: dict[int, SequenceLogprobs] = field(default_factory=dict)
    completions: dict[int, CompletionOutput] = field(default_factory=dict)


class OutputProcessor:
    """Owns the texts so far, and the requests that are not finished."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._hidden_tokens = special_tokens(tokenizer)
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.params.logprobs is not None or request.params.prompt_logprobs is not None:
            for seq in request.seqs:
                request.logprobs[seq.sample_index] = SequenceLogprobs(
                    self._tokenizer, request.params, seq.prompt_logprobs_from
                )

    def forget(self, outputs: list[RequestOutput]) -> None:
        """Let go of the requests whose final outputs are in the engine's keeping."""
        for output in outputs:
            if output.finished:
                self.requests.pop(output.request_id, None)

    def process(
        self, updates: SequenceUpdates, step_output: StepOutput
    ) -> tuple[list[RequestOutput], list[tuple[Sequence, str]]]:
        """Take in what a step drew.

        Returns:
            requests that are finished now, to be forgotten, and streamed ones that have more text
            (sequence, stop string) of sequences that must not go on
        """
        stopped: list[tuple[Sequence, str]] = []
        touched: dict[str, Request] = {}
        for span in updates.prompt_spans:
            request = self.requests.get(span.seq.request_id)
            if request is not None and step_output.prompt_logprobs is not None:
                request.logprobs[span.seq.sample_index].push_prompt(
                    step_output.prompt_logprobs, span.start, span.end, span.first_position
                )
        for seq, place in updates.watched:
            request = self.requests.get(seq.request_id)
            if request is None:
                continue  # aborted while the step ran
            sample = seq.sample_index
            if request.params.logprobs is not None and step_output.logprobs is not None:
                request.logprobs[sample].push(step_output.logprobs, place)
            text = self._text_of(request, seq)
            if text is None:
                continue
            searched = len(text.searchable)
            text.push(seq.token_ids[-1])
            hit = None
            if seq.num_output_tokens > request.params.min_tokens:
                hit = find_stop(text.searchable, request.params.stop, searched)
            if hit is not None:
                self._complete(request, seq, stop=hit)
                stopped.append((seq, hit[1]))
            if hit is not None or request.is_streamed:
                touched[request.request_id] = request
        for seq in updates.finished:
            request = self.requests.get(seq.request_id)
            if request is not None:
                touched[request.request_id] = request
                if seq.sample_index not in request.completions:
                    self._complete(request, seq)
        return self._outputs(touched), stopped

    def restart(self) -> tuple[list[Sequence], list[RequestOutput]]:
        """After a fault in the middle of a step: go back to what is known of every request.

        Returns:
            sequences that must run again, in the order in which they came
            outputs of requests that are finished, and had not been handed over
        """
        seqs = []
        for request in self.requests.values():
            for seq in request.seqs:
                if seq.sample_index in request.completions:
                    # Ended by a stop string, of which the scheduler may not have heard.
                    seq.status = SequenceStatus.FINISHED
                    continue
                seq.restart()
                if (logprobs := request.logprobs.get(seq.sample_index)) is not None:
                    logprobs.keep(seq.num_output_tokens)
                request.texts.pop(seq.sample_index, None)
                seqs.append(seq)
        done = {i: r for i, r in self.requests.items() if len(r.completions) == len(r.seqs)}
        return seqs, self._outputs(done)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request as it stands: its text so far, finish_reason "abort"."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for seq in request.seqs:
            if seq.sample_index not in request.completions:
                try:
                    self._complete(request, seq)
                except Exception:  # a tokenizer that raises: what it had must end all the same
                    logger.warning("The text of an aborted request is lost", exc_info=True)
                    request.completions[seq.sample_index] = CompletionOutput(
                        index=seq.sample_index,
                        text="",
                        token_ids=seq.token_ids[seq.num_prompt_tokens :],
                        finish_reason=seq.finish_reason,
                    )
        return self._output(request, is_finished=True)

    def _text_of(self, request: Request, seq: Sequence) -> IncrementalText | None:
        """The text before the last token, where it is made token by token."""
        text = request.texts.get(seq.sample_index)
        needs_text = request.params.stop or request.is_streamed
        if text is None and needs_text and self._tokenizer is not None:
            text = IncrementalText(self._tokenizer, request.params, self._hidden_tokens)
            for token_id in seq.token_ids[seq.num_prompt_tokens : -1]:  # after a fault
                text.push(token_id)
            request.texts[seq.sample_index] = text
        return text

    def _complete(
        self, request: Request, seq: Sequence, stop: tuple[int, str] | None = None
    ) -> None:
        """Make the final output of one generation."""
        params = request.params
        token_ids = seq.token_ids[seq.num_prompt_tokens :]
        reason, stop_reason = seq.finish_reason, seq.stop_reason
        stop = stop or self._stop_in_rest(request, seq)
        if stop is not None:
            start, stop_reason = stop
            reason, text = "stop", request.texts[seq.sample_index].text_before(start)
            if params.include_stop_str_in_output:
                text += stop_reason
        else:
            text = self._final_text(token_ids, seq, params)
        logprobs = request.logprobs.get(seq.sample_index)
        request.completions[seq.sample_index] = CompletionOutput(
            index=seq.sample_index,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            cumulative_logprob=logprobs.cumulative
            if logprobs and params.logprobs is not None
            else None,
            logprobs=logprobs.positions if logprobs and params.logprobs is not None else None,
        )

    def _stop_in_rest(self, request: Request, seq: Sequence) -> tuple[int, str] | None:
        """A stop string in what was held back for the rest of a character, which never came."""
        text, params = request.texts.get(seq.sample_index), request.params
        is_ended = seq.finish_reason in ("length", "stop")
        if text is None or not params.stop or not is_ended:
            return None
        searched = len(text.searchable)
        text.finish()
        if seq.num_output_tokens <= params.min_tokens:
            return None
        return find_stop(text.searchable, params.stop, searched)

    def _final_text(self, token_ids: list[int], seq: Sequence, params: SamplingParams) -> str:
        if self._tokenizer is None or not params.detokenize:
            return ""
        # The token that ended it, end-of-sequence or a stop id, is kept in the ids, not the text.
        if seq.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return str(self._tokenizer.decode(token_ids, **decode_options(params)))

    def _outputs(self, touched: dict[str, Request]) -> list[RequestOutput]:
        outputs = []
        for request in touched.values():
            is_finished = len(request.completions) == len(request.seqs)
            if is_finished or request.is_streamed:
                outputs.append(self._output(request, is_finished))
        return outputs

    def _output(self, request: Request, is_finished: bool) -> RequestOutput:
        completions = []
        for seq in request.seqs:
            done = request.completions.get(seq.sample_index)
            completions.append(done or self._partial(request, seq))
        first = request.logprobs.get(0)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=is_finished,
            num_cached_tokens=request.seqs[0].num_cached_tokens,
            prompt_logprobs=first.prompt_positions if first is not None else None,
        )

    def _partial(self, request: Request, seq: Sequence) -> CompletionOutput:
        return CompletionOutput(
            index=seq.sample_index,
            text=request.texts[seq.sample_index].to_give(
                max(map(len, request.params.stop), default=1)
            ),
            token_ids=seq.token_ids[seq.num_prompt_tokens :],
        )
