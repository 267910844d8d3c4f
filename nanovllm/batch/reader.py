"""From lines to the engine: parsed, checked against what is finished, laid out by the template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from threading import Event
from typing import Any

from nanovllm.batch.done import IdSet
from nanovllm.batch.journal import Journal
from nanovllm.batch.prompts import chat_text, encode_chats
from nanovllm.batch.records import DUPLICATE, BadLine, Job, LineParser, custom_id_of, error_record
from nanovllm.batch.source import MAX_LINE_BYTES, LineSource
from nanovllm.sampling_params import SamplingParams

_CHUNK = 64  # chats tokenised at once


class JobReader:
    """Owns the jobs that the engine was given and has not answered.

    `pairs` runs in the thread that feeds the engine; `take` in the one that gets its results.
    """

    def __init__(
        self,
        source: LineSource,
        parser: LineParser,
        journal: Journal,
        tokenizer: Any,
        *,
        shard: tuple[int, int],
        stop: Event,
    ) -> None:
        self.num_bad = 0
        self.models: set[str] = set()  # that lines named
        self._source = source
        self._parser = parser
        self._journal = journal
        self._tokenizer = tokenizer
        self._shard = shard
        self._stop = stop
        self._seen = IdSet()
        self._open: dict[int, Job] = {}

    def pairs(self) -> Iterator[tuple[Any, SamplingParams]]:
        """Yield what `generate_iter` takes; write the error of each line that cannot run."""
        jobs, index = self._jobs(), 0
        while chunk := list(islice(jobs, _CHUNK)):
            for job, prompt in self._with_prompts(chunk):
                self._open[index] = job
                index += 1
                yield prompt, job.params

    def take(self, index: int) -> Job:
        """The job that was yielded as number `index`; it is forgotten here."""
        return self._open.pop(index)

    def _jobs(self) -> Iterator[Job]:
        which, num_shards = self._shard
        for number, line in self._source:
            if self._stop.is_set():
                return
            if line is not None and not line.strip():
                continue
            if (number - 1) % num_shards != which:
                # Whose id it is must not depend on the shard: all shards together are one job.
                if (other := custom_id_of(line or b"")) is not None:
                    self._seen.add(other)
                continue
            try:
                job = self._parsed(line, number)
                if self._is_new(job.custom_id, number):
                    if job.form != "plain" and len(self.models) < 100:
                        self.models.add(job.model)
                    yield job
            except BadLine as bad:
                self._refuse(bad, number)

    def _parsed(self, line: bytes | None, number: int) -> Job:
        if line is None:
            raise BadLine(f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            return self._parser.parse(line, number)
        except BadLine as bad:
            # Its id is taken from here on; DUPLICATE is raised where it was before.
            is_new = self._is_new(bad.custom_id, number)
            if not is_new or (bad.custom_id is None and self._was_refused(number)):
                raise _Finished from bad
            raise

    def _is_new(self, custom_id: str | None, number: int) -> bool:
        """Whether a line is still to be done; BadLine if its custom_id was seen before."""
        if custom_id is None:
            is_new = number not in self._journal.finished_lines
        elif self._journal.finished_ids.discard(custom_id):
            self._seen.add(custom_id)
            is_new = False
        elif self._seen.add(custom_id):
            is_new = True
        elif self._was_refused(number):
            raise _Finished
        else:
            raise BadLine(
                f"custom_id {custom_id!r} was on an earlier line",
                custom_id=custom_id,
                code=DUPLICATE,
            )
        return is_new

    def _was_refused(self, number: int) -> bool:
        # Only asked of a line that is bad: one that was cut and is whole now is run.
        return number in self._journal.error_lines

    def _refuse(self, bad: BadLine, number: int) -> None:
        if isinstance(bad, _Finished):
            return  # its error was written in an earlier run
        self.num_bad += 1
        self._journal.append(error_record(bad, number))

    def _with_prompts(self, jobs: list[Job]) -> list[tuple[Job, Any]]:
        """Each job with the engine's prompt; chats are laid out and tokenised together."""
        prompts: list[tuple[Job, Any]] = []
        texts: dict[int, str] = {}
        for job in jobs:
            if job.messages is None:
                prompts.append((job, job.prompt))
                continue
            try:
                texts[len(prompts)] = chat_text(self._tokenizer, job.messages, job.template)
                prompts.append((job, None))
            except ValueError as error:
                plain = job.plain if job.form == "plain" else None
                self._refuse(
                    BadLine(str(error), custom_id=job.custom_id, plain=plain), job.line_number
                )
        encoded = encode_chats(self._tokenizer, list(texts.values()))
        for place, prompt in zip(texts, encoded, strict=True):
            prompts[place] = (prompts[place][0], prompt)
        return prompts


class _Finished(BadLine):
    """A bad line whose error was written in an earlier run."""

    def __init__(self) -> None:
        super().__init__("finished before")
