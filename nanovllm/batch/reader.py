"""From lines to the engine: parsed, checked against what is finished, laid out by the template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from threading import Event
from typing import Any

from nanovllm.batch.done import IdSet
from nanovllm.batch.journal import Journal
from nanovllm.batch.near_misses import NearMisses
from nanovllm.batch.prompts import chat_text, encode_chats
from nanovllm.batch.records import (
    DUPLICATE,
    BadLine,
    Job,
    LineParser,
    custom_id_of,
    error_record,
    line_digest,
)
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
        max_model_len: int,
        shard: tuple[int, int],
        stop: Event,
    ) -> None:
        self.num_bad = 0
        self.num_mended = 0  # lines whose number has an error in the file, of what they were then
        self.models: set[str] = set()  # that lines named
        self.near_misses = NearMisses()
        self._source = source
        self._parser = parser
        self._journal = journal
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._shard = shard
        self._stop = stop
        self._seen = IdSet()
        self._open: dict[int, Job] = {}

    def pairs(self) -> Iterator[tuple[Any, SamplingParams]]:
        """Yield what `generate_iter` takes; write the error of each line that cannot run."""
        jobs, index = self._jobs(), 0
        # Whoever writes to a pipe may wait for an answer before the next line.
        chunk_size = 1 if self._source.is_pipe else _CHUNK
        while chunk := list(islice(jobs, chunk_size)):
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
            digest = line_digest(line)
            try:
                job = self._parsed(line, number, digest)
                if self._is_new(job.custom_id, number, digest):
                    if job.form == "plain":
                        self.near_misses.look(job.plain, number)
                    elif len(self.models) < 100:
                        self.models.add(job.model)
                    yield job
            except BadLine as bad:
                self._refuse(bad, number, digest)

    def _parsed(self, line: bytes | None, number: int, digest: str) -> Job:
        try:
            if line is None:
                raise BadLine(f"is longer than {MAX_LINE_BYTES >> 20} MiB")
            return self._parser.parse(line, number)
        except BadLine as bad:
            # Its id is taken from here on; DUPLICATE is raised where it was before.
            if not self._is_new(bad.custom_id, number, digest):
                raise _Finished from bad
            raise

    def _is_new(self, custom_id: str | None, number: int, digest: str) -> bool:
        """Whether a line is still to be done; BadLine if its custom_id was seen before.

        RefusedOutput if it was done, but was another line then.
        """
        if custom_id is None and number in self._journal.finished_lines:
            self._journal.check_unchanged(number, digest, number)
            is_new = False
        elif custom_id is None:
            # One that had an error and was mended since is run.
            was_refused = self._was_refused(number)
            is_new = not (was_refused and self._journal.answers(number, digest))
            self.num_mended += is_new and was_refused
        elif self._journal.finished_ids.discard(custom_id):
            self._journal.check_unchanged(custom_id, digest, number)
            self._seen.add(custom_id)
            self.num_mended += self._was_refused(number)
            is_new = False
        elif self._seen.add(custom_id):
            self.num_mended += self._was_refused(number)
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
        return number in self._journal.error_lines

    def _refuse(self, bad: BadLine, number: int, digest: str) -> None:
        if isinstance(bad, _Finished):
            return  # its error was written in an earlier run
        self.num_bad += 1
        try:
            self._journal.append(error_record(bad, number, digest))
        except ValueError:  # the line's own keys cannot be copied
            bad.plain = None
            self._journal.append(error_record(bad, number, digest))

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
            except Exception as error:  # it is this line's alone
                self._refuse_prompt(job, error)
        encoded = encode_chats(self._tokenizer, list(texts.values()), self._max_model_len)
        for place, prompt in zip(texts, encoded, strict=True):
            prompts[place] = (prompts[place][0], prompt)
        for job, prompt in prompts:
            if isinstance(prompt, ValueError):
                self._refuse_prompt(job, prompt)
        return [pair for pair in prompts if not isinstance(pair[1], ValueError)]

    def _refuse_prompt(self, job: Job, error: Exception) -> None:
        plain = job.plain if job.form == "plain" else None
        bad = BadLine(str(error), custom_id=job.custom_id, plain=plain)
        self._refuse(bad, job.line_number, job.digest)


class _Finished(BadLine):
    """A bad line whose error was written in an earlier run."""

    def __init__(self) -> None:
        super().__init__("finished before")
