"""From the engine's output to the line that is written, in the form of the request's line."""

from __future__ import annotations

from typing import Any

from nanovllm.batch.records import BadLine, Job, api_record, error_record
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput


def result_record(job: Job, output: RequestOutput) -> dict[str, Any]:
    """The output line of a finished request, or of one that the engine refused."""
    if output.error is not None:
        plain = job.plain if job.form == "plain" else None
        # The engine counts prompts its own way; a reader of this line wants the line's number.
        reason = output.error.partition(" ")[2].partition(" ")[2] or output.error
        bad = BadLine(f"the prompt {reason}", custom_id=job.custom_id, plain=plain)
        return error_record(bad, job.line_number, job.digest)
    usage = _usage(output)
    if job.form == "plain":
        return _plain_record(job, output, usage)
    choice = _chat_choice if job.form == "chat" else _completion_choice
    return api_record(job, [choice(answer, job) for answer in output.outputs], usage)


def _plain_record(job: Job, output: RequestOutput, usage: dict[str, Any]) -> dict[str, Any]:
    answers = output.outputs
    record: dict[str, Any] = {
        **job.plain,
        "output": _one_or_all([answer.text for answer in answers], job),
        "finish_reason": _one_or_all([answer.finish_reason for answer in answers], job),
        "usage": usage,
    }
    if job.params.logprobs is not None:
        record["token_logprobs"] = _one_or_all(
            [_chat_logprobs(answer, job)["content"] for answer in answers], job
        )
    if job.custom_id is None:
        record["input_line"] = job.line_number
    record["input_digest"] = job.digest
    return record


def _one_or_all(values: list[Any], job: Job) -> Any:
    return values if job.params.n > 1 else values[0]


def _usage(output: RequestOutput) -> dict[str, Any]:
    num_prompt, num_output = len(output.prompt_token_ids), output.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _chat_choice(answer: CompletionOutput, job: Job) -> dict[str, Any]:
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text},
        "logprobs": None if job.params.logprobs is None else _chat_logprobs(answer, job),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _completion_choice(answer: CompletionOutput, job: Job) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": answer.text,
        "logprobs": None if job.params.logprobs is None else _completion_logprobs(answer, job),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _chat_logprobs(answer: CompletionOutput, job: Job) -> dict[str, Any]:
    content = []
    for token_id, position in _positions(answer):
        top = sorted(position.items(), key=_rank)[: job.params.logprobs or None]
        content.append(
            {
                **_token(token_id, position[token_id]),
                "top_logprobs": [_token(i, logprob) for i, logprob in top]
                if job.params.logprobs
                else [],
            }
        )
    return {"content": content}


def _completion_logprobs(answer: CompletionOutput, job: Job) -> dict[str, Any]:
    tokens, values, tops, offsets = [], [], [], []
    offset = 0
    for token_id, position in _positions(answer):
        chosen = _token(token_id, position[token_id])
        tokens.append(chosen["token"])
        values.append(chosen["logprob"])
        top = sorted(position.items(), key=_rank)[: job.params.logprobs or None]
        tops.append({_token(i, logprob)["token"]: _number(logprob) for i, logprob in top})
        offsets.append(offset)
        offset += len(chosen["token"])
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if job.params.logprobs else None,
        "text_offset": offsets,
    }


def _positions(answer: CompletionOutput) -> list[tuple[int, dict[int, Logprob]]]:
    return list(zip(answer.token_ids, answer.logprobs or [], strict=False))


def _rank(item: tuple[int, Logprob]) -> tuple[float, int]:
    return -item[1].logprob, item[0]


def _token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token
    text = f"token_id:{token_id}" if text is None else text
    return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode())}


def _number(logprob: Logprob) -> float:
    # Of a token that cannot be drawn: -inf, which JSON has not. Others write this, too.
    return max(logprob.logprob, -9999.0)
