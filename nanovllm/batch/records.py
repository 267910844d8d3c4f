"""One line in, one line out: what a request line may say, and how its result is written."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from nanovllm.batch.api_fields import (
    CHAT_URL,
    COMPLETIONS_URL,
    NOT_IN_A_LINE,
    chat_request,
    completion_request,
    sampling_fields,
    template_fields,
    text_of_messages,
)
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.json_file import unambiguous

_ID_PREFIX = "batch_req_"
DUPLICATE = "duplicate_custom_id"
_ENVELOPE = ("custom_id", "method", "url", "body")
_RESULT_KEYS = (
    "output",
    "finish_reason",
    "usage",
    "error",
    "input_line",
    "input_digest",
    "token_logprobs",
)
_DIGEST_CHARS = 12
_MAX_REASON_CHARS = 1000  # a reason quotes what it refuses, which may be the whole of a long line


class BadLine(Exception):
    """A line that cannot be run. `custom_id` is its own where it could be read."""

    def __init__(
        self,
        reason: str,
        *,
        custom_id: str | None = None,
        code: str = "invalid_request",
        plain: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(_shortened(reason))
        self.custom_id = custom_id
        self.code = code
        self.plain = plain  # the line's object, if it has the plain form


@dataclass(frozen=True, slots=True)
class Job:
    """One good line: what to run, and what its result line needs."""

    line_number: int
    custom_id: str | None
    form: str  # "chat", "completions" or "plain"
    prompt: str | list[int] | None  # None: `messages` has it
    messages: list[Any] | None
    template: dict[str, Any]  # options of the chat template
    params: SamplingParams
    model: str
    plain: dict[str, Any] = field(default_factory=dict)  # the line's object, in the plain form
    digest: str = ""  # of the line


@dataclass(frozen=True, slots=True)
class LineParser:
    """Reads request lines; what a line leaves open is taken from here."""

    model: str
    seed: int  # the engine's, from which unset seeds derive
    defaults: Mapping[str, Any]  # keyword arguments of SamplingParams

    def parse(self, line: bytes, line_number: int) -> Job:
        """The job of a line, or BadLine."""
        data = _load(line)
        custom_id = data.get("custom_id")
        is_plain = not {"body", "url", "method"} & data.keys()
        if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
            kind = type(custom_id).__name__
            raise BadLine(f"custom_id must be a string that is not empty, got one of type {kind}")
        try:
            make = self._plain_job if is_plain else self._api_job
            return replace(make(data, custom_id, line_number), digest=line_digest(line))
        except Exception as error:  # whatever it is, it is this line's alone
            plain = data if is_plain and not _taken_keys(data) else None
            known = isinstance(error, (TypeError, ValueError))
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise BadLine(reason, custom_id=custom_id, plain=plain) from error

    def _plain_job(self, data: dict[str, Any], custom_id: str | None, line_number: int) -> Job:
        given = [name for name in ("prompt", "messages") if name in data]
        if len(given) != 1:
            raise ValueError(
                f"a line has 'prompt' or 'messages' (or custom_id, method, url, body), "
                f"got the keys {', '.join(map(repr, islice(data, 10))) or 'none'}"
            )
        if taken := _taken_keys(data):
            raise ValueError(f"the key {taken[0]!r} is where the result goes; rename it")
        for name in NOT_IN_A_LINE & data.keys():
            raise ValueError(f"{name!r} cannot be asked for in a line; leave it out")
        messages = data.get("messages")
        return Job(
            line_number,
            custom_id,
            "plain",
            data.get("prompt"),
            None if messages is None else text_of_messages(messages),
            template_fields(data),
            self._params(sampling_fields(data), custom_id, line_number),
            self.model,
            data,
        )

    def _api_job(self, data: dict[str, Any], custom_id: str | None, line_number: int) -> Job:
        unknown = [name for name in data if name not in _ENVELOPE]
        missing = [name for name in _ENVELOPE if data.get(name) is None]
        if unknown or missing:
            what = f"unknown field {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
            raise ValueError(f"{what}: a line has {', '.join(_ENVELOPE)}, each once")
        if data["method"] != "POST":
            raise ValueError(f"method must be 'POST', got {data['method']!r}")
        body = data["body"]
        if not isinstance(body, dict):
            raise TypeError(f"body must be an object, got {type(body).__name__}")
        if data["url"] == CHAT_URL:
            form, request = "chat", chat_request(body)
        elif data["url"] == COMPLETIONS_URL:
            form, request = "completions", completion_request(body)
        else:
            raise ValueError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}, got {data['url']!r}")
        sampling = request.sampling
        if "max_tokens" not in self.defaults:  # as in the API: to the context limit, or 16
            sampling = {"max_tokens": None if form == "chat" else 16, **sampling}
        params = self._params(sampling, custom_id, line_number)
        model = body.get("model") or self.model
        if not isinstance(model, str):
            raise TypeError(f"model must be a string, got {model!r}")
        return Job(
            line_number,
            custom_id,
            form,
            request.prompt,
            request.messages,
            request.template,
            params,
            model,
        )

    def _params(
        self, named: Mapping[str, Any], custom_id: str | None, line_number: int
    ) -> SamplingParams:
        options = {**self.defaults, **named}
        if options.get("n") is None:
            options.pop("n", None)
        if options.get("seed") is None:
            options["seed"] = line_seed(self.seed, custom_id or line_number)
        return SamplingParams(**options)


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a line that is not to be run; None where it has none that could be."""
    try:
        custom_id = _load(line).get("custom_id") if b"custom_id" in line else None
    except BadLine:
        return None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def line_seed(engine_seed: int, key: str | int) -> int:
    """The seed of a line that names none: the same in every run, whatever ran before."""
    text = f"{engine_seed}:{type(key).__name__}:{key}"
    return int.from_bytes(hashlib.blake2b(_utf8(text), digest_size=7).digest(), "big")


def changed_fields(params: SamplingParams) -> dict[str, Any]:
    """The keyword arguments that differ from the defaults of SamplingParams."""
    default = SamplingParams()
    names = [item.name for item in fields(params)]
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}


# ---- what is written


def error_record(bad: BadLine, line_number: int, digest: str = "") -> dict[str, Any]:
    """The output line of a line that could not be run."""
    # What is said of a line may quote the half surrogate that it is refused for.
    reason = str(bad).encode("utf-8", errors="backslashreplace").decode()
    error = {"code": bad.code, "message": reason, "line": line_number}
    if bad.plain is not None:
        result = {"output": None, "finish_reason": "error", "error": error}
        return {**bad.plain, **result, "input_digest": digest}
    return {
        "id": _record_id(line_number, bad.custom_id, digest),
        "custom_id": bad.custom_id,
        "response": None,
        "error": error,
    }


def api_record(job: Job, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """The output line of a request in the OpenAI form."""
    identity = _record_id(job.line_number, job.custom_id, job.digest)
    suffix = identity.removeprefix(_ID_PREFIX)
    is_chat = job.form == "chat"
    return {
        "id": identity,
        "custom_id": job.custom_id,
        "response": {
            "status_code": 200,
            "request_id": f"req_{suffix}",
            "body": {
                "id": f"chatcmpl-{suffix}" if is_chat else f"cmpl-{suffix}",
                "object": "chat.completion" if is_chat else "text_completion",
                "created": int(time.time()),
                "model": job.model,
                "choices": choices,
                "usage": usage,
            },
        },
        "error": None,
    }


def record_key(record: dict[str, Any]) -> str | int:
    """Which line an output line answers: its custom_id, or the line's number.

    KeyError or ValueError: it says none, so it is no result.
    """
    error = record.get("error")
    if not isinstance(error, dict) and record.get("output", record.get("response")) is None:
        raise KeyError("output")  # a request, or something else that has a custom_id
    if isinstance(error, dict) and error["code"] == DUPLICATE:
        return _line_number(error["line"])
    custom_id = record.get("custom_id")
    if isinstance(custom_id, str):
        return custom_id
    return _line_number(error["line"] if isinstance(error, dict) else record["input_line"])


def _line_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no line number")
    return value


def record_digest(record: dict[str, Any]) -> str:
    """The digest of the line that an output line answers; empty where it has none."""
    digest = record.get("input_digest")
    if digest is None and str(record.get("id", "")).startswith(_ID_PREFIX):
        digest = record["id"][-_DIGEST_CHARS:]
    return digest if isinstance(digest, str) else ""


def line_digest(line: bytes | None) -> str:
    """What tells a line from one that stood there before; None: a line too long to hold."""
    data = b"" if line is None else line.strip()
    return hashlib.blake2b(data, digest_size=_DIGEST_CHARS // 2).hexdigest()


def dump_line(record: dict[str, Any]) -> bytes:
    """A record as one line of UTF-8, to every reader's mind. ValueError where it is no JSON."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # They stand in strings only; str.splitlines, for one, takes them for the end of a line.
    for end in "\x85\u2028\u2029":
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode() + b"\n"


def _load(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        data = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=unambiguous,
        )
    except RecursionError:
        raise BadLine("is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadLine(f"is not valid JSON: {error}", code="invalid_json") from error
    if b"\\ud" in line or b"\\uD" in line:
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except RecursionError:
            raise BadLine("is nested too deeply", code="invalid_json") from None
        except UnicodeEncodeError as error:
            raise BadLine("holds one half of a surrogate pair", code="invalid_json") from error
    if not isinstance(data, dict):
        raise BadLine(f"must be a JSON object, got {type(data).__name__}", code="invalid_json")
    return data


def _shortened(reason: str) -> str:
    if len(reason) <= _MAX_REASON_CHARS:
        return reason
    # What to do stands at the end.
    return f"{reason[: _MAX_REASON_CHARS // 2]} ... {reason[-_MAX_REASON_CHARS // 2 :]}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # it would be written as Infinity, which is no JSON
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _taken_keys(data: dict[str, Any]) -> list[str]:
    return [name for name in _RESULT_KEYS if name in data]


def _record_id(line_number: int, custom_id: str | None, digest: str) -> str:
    """Unlike those of other lines; ends in the line's digest."""
    text = f"{line_number}:{custom_id}"
    return f"{_ID_PREFIX}{hashlib.blake2b(_utf8(text), digest_size=6).hexdigest()}{digest}"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")
