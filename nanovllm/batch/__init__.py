"""Jobs that take hours: requests in, results out, gone on with after a crash."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import tee
from pathlib import Path
from threading import Event, Thread
from typing import Any

from nanovllm.batch.fingerprint import job_fingerprint, known_head_bytes
from nanovllm.batch.journal import Journal, RefusedOutput, job_path_of
from nanovllm.batch.options import BatchOptions
from nanovllm.batch.paths import check_paths
from nanovllm.batch.progress import BatchProgress, Standing
from nanovllm.batch.reader import JobReader
from nanovllm.batch.records import BadLine, LineParser, changed_fields, error_record
from nanovllm.batch.results import result_record
from nanovllm.batch.source import LineSource, count_lines, is_regular_file
from nanovllm.batch.stop import DrainOnSignal
from nanovllm.batch.summary import BatchSummary
from nanovllm.config import Config
from nanovllm.data_parallel import DataParallelLLM, open_llm
from nanovllm.llm import LLM
from nanovllm.metrics import StepSample
from nanovllm.outputs import RequestOutput
from nanovllm.report import Timeline, TraceWriter, write_report
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int

__all__ = ["BatchOptions", "BatchSummary", "RefusedOutput", "run_batch"]

logger = logging.getLogger(__name__)

_MAX_NOTES = 20  # of one kind in a summary; the log has all


def run_batch(
    model: str | os.PathLike[str],
    options: BatchOptions,
    *,
    data_parallel_size: int = 1,
    **engine_options: Any,
) -> BatchSummary:
    """Answer every line of the input that the output does not answer yet; see README.md.

    A finished request is in the output file before the next step starts. RefusedOutput (a
    ValueError) says why an output file cannot be gone on with.
    """
    if not isinstance(options, BatchOptions):
        raise TypeError(
            "options must be a BatchOptions, such as BatchOptions('in.jsonl', Path('out.jsonl')), "
            f"got {options!r:.200} of type {type(options).__name__}."
        )
    config = Config.from_options(model, engine_options)
    size = check_int("data_parallel_size", data_parallel_size, minimum=1)
    SamplingParams(**options.sampling)  # refuses bad defaults before any work starts
    _check_files(options)
    job = job_fingerprint(
        config,
        options.sampling,
        source=options.input,
        shard=options.shard,
        head_bytes=None if options.overwrite else known_head_bytes(job_path_of(options.output)),
    )
    with ExitStack() as stack:
        drain = stack.enter_context(DrainOnSignal()).event
        journal = stack.enter_context(
            Journal(
                options.output,
                job,
                fsync_interval_s=options.fsync_interval_s,
                overwrite=options.overwrite,
                force=options.force_resume,
                retry_failed=options.retry_failed,
            )
        )
        if len(journal.finished_lines) and not is_regular_file(options.input):
            raise RefusedOutput(
                f"{options.output} has results of lines without custom_id. From a pipe a job can "
                "be gone on with by custom_id only: give every line one, or pass --overwrite."
            )
        started = time.monotonic()
        # As they were checked: relative paths are those of before.
        checked = {name: getattr(config, name) for name in engine_options}
        llm = open_llm(config.model, size, checked)
        stack.callback(llm.close)
        summary = BatchSummary(
            num_done_before=journal.num_finished,
            num_failed_before=journal.num_errors,
            load_s=time.monotonic() - started,
        )
        run = _Run(llm, os.fspath(model), config.seed, options, journal, summary, drain)
        try:
            run.go()
        finally:
            run.close()
    return summary


def _check_files(options: BatchOptions) -> None:
    """ValueError for files that cannot be right. Nothing was opened before, or is here."""
    output = options.output
    if options.input != "-" and not Path(options.input).exists():
        raise ValueError(f"The input {options.input} does not exist.")
    if options.input != "-" and Path(options.input).is_dir():
        raise ValueError(f"The input {options.input} is a directory. Name a file of it.")
    if options.input != "-" and not os.access(options.input, os.R_OK):
        raise ValueError(f"The input {options.input} may not be read: no permission.")
    if options.input == "-" and sys.__stdin__ is None:  # its descriptor may be another file's now
        raise ValueError("The input is '-', but standard input is closed. Name a file, or pipe.")
    if output.exists() and not output.is_file():
        raise RefusedOutput(f"The output {output} is no file that a job could be gone on with.")
    check_paths(
        options.input,
        {
            "the output": output,
            "the output's .job.json": job_path_of(output),
            "--metrics": options.metrics,
            "--report": options.report,
            "--trace": options.trace,
        },
    )


class _Run:
    """Owns what one run of a job needs besides the engine and the output file."""

    def __init__(
        self,
        llm: LLM | DataParallelLLM,
        model: str,
        seed: int,
        options: BatchOptions,
        journal: Journal,
        summary: BatchSummary,
        drain: Event,
    ) -> None:
        self._llm = llm
        self._options = options
        self._journal = journal
        self._summary = summary
        self._drain = drain
        self._model = Path(model).name
        defaults = {**changed_fields(llm.get_default_sampling_params()), **options.sampling}
        self._source = LineSource(options.input, drain)
        self._reader = JobReader(
            self._source,
            LineParser(model, seed, defaults),
            journal,
            llm.get_tokenizer(),
            max_model_len=llm.max_model_len,
            shard=options.shard,
            stop=drain,
        )
        self._started = time.monotonic()
        self._total: int | None = None
        self._stop_counting = Event()
        self._timeline = Timeline(time.time())
        self._trace: TraceWriter | None = None
        if options.trace is not None:
            self._write_file("--trace", options.trace, self._open_trace)
        self._progress = BatchProgress(self._standing, is_shown=options.show_progress)

    def go(self) -> None:
        """Run all that is left to do; what `drain` cuts short is left for another run."""
        if self._options.show_progress and is_regular_file(self._options.input):
            Thread(target=self._count_total, name="nanovllm-count", daemon=True).start()
        if self._options.report is not None or self._trace is not None:
            self._llm.observe_steps(self._observe)
        prompts, params = tee(self._reader.pairs())
        results = self._llm.generate_iter(
            (prompt for prompt, _ in prompts),
            (item for _, item in params),
            window=self._options.window,
            drain=self._drain,
        )
        for index, output in results:
            self._write(index, output)

    def close(self) -> None:
        """End what runs beside the engine, and write what was asked for, complete or not."""
        summary = self._summary
        self._stop_counting.set()
        self._progress.close()
        summary.is_interrupted = self._drain.is_set()
        self._drain.set()  # a read of a pipe that still goes on ends, too
        self._source.close()
        summary.run_s = time.monotonic() - self._started
        summary.num_failed += self._reader.num_bad
        summary.num_done_before -= self._reader.num_mended
        summary.num_failed_before -= self._reader.num_mended
        summary.input_failure = self._source.failure
        summary.engine = self._llm.metrics.as_dict()
        if isinstance(self._llm, DataParallelLLM):
            summary.notes += self._llm.faults
        others = {name for name in self._reader.models if Path(name).name != self._model}
        if others:
            summary.notes.append(
                f"Lines that name another model were run on {self._model}: "
                f"{', '.join(sorted(others)[:5])}."
            )
        summary.notes += self._reader.near_misses.notes[:_MAX_NOTES]
        options = self._options
        if self._trace is not None:
            self._write_file("--trace", options.trace, self._trace.close)
        self._write_file("--report", options.report, self._write_report)
        self._write_file("--metrics", options.metrics, self._write_metrics)

    def _write_file(self, name: str, path: Path | None, write: Callable[[], None]) -> None:
        """Write one of the files beside the output, which may fail by itself."""
        if path is None:
            return
        try:
            write()
        except Exception as error:
            logger.debug("%s", name, exc_info=True)
            self._summary.file_failures.append(f"{name} {path} was not written: {error}.")

    def _open_trace(self) -> None:
        assert self._options.trace is not None
        self._trace = TraceWriter(self._options.trace, time.time())

    def _write_report(self) -> None:
        summary, path = self._summary, self._options.report
        assert path is not None
        if path.exists() and not (summary.num_ok or summary.num_failed):
            # A job that is started again when it is done must not lose the charts of its night.
            summary.notes.append(f"Nothing was left to do: {path} is that of an earlier run.")
            return
        title = f"{self._model}: {Path(self._options.input).name}"
        write_report(path, self._timeline, title=title, facts=summary.facts())

    def _write_metrics(self) -> None:
        assert self._options.metrics is not None
        text = json.dumps(self._summary.as_dict(), indent=1)
        self._options.metrics.write_text(text + "\n", encoding="utf-8")

    def _observe(self, sample: StepSample) -> None:
        self._timeline.add_step(sample)
        trace = self._trace
        if trace is not None:
            num_failures = len(self._summary.file_failures)
            self._write_file("--trace", self._options.trace, lambda: trace.add_step(sample))
            if len(self._summary.file_failures) > num_failures:
                self._trace = None

    def _write(self, index: int, output: RequestOutput) -> None:
        job, failed = self._reader.take(index), output.error is not None
        try:
            self._journal.append(result_record(job, output))
        except OSError:
            raise
        except Exception as error:  # it is this line's alone
            reason = f"the result cannot be written ({type(error).__name__}: {error})"
            bad = BadLine(reason, custom_id=job.custom_id, code="unwritable_result")
            self._journal.append(error_record(bad, job.line_number, job.digest))
            failed = True
        summary = self._summary
        if failed:
            summary.num_failed += 1
            return
        summary.num_ok += 1
        summary.num_prompt_tokens += len(output.prompt_token_ids)
        summary.num_cached_tokens += output.num_cached_tokens
        summary.num_output_tokens += output.num_output_tokens
        summary.finish_reasons.update(str(answer.finish_reason) for answer in output.outputs)
        if self._options.report is not None:
            self._timeline.add_request(len(output.prompt_token_ids), output.num_output_tokens)

    def _standing(self) -> Standing:
        summary, num_bad = self._summary, self._reader.num_bad
        num_done = summary.num_ok + summary.num_failed + num_bad
        return Standing(
            num_done=num_done + summary.num_done_before,
            num_done_now=num_done,
            num_failed=summary.num_failed + num_bad + summary.num_failed_before,
            num_output_tokens=self._llm.metrics.num_output_tokens,
            total=self._total,
            fraction=self._source.fraction_read,
        )

    def _count_total(self) -> None:
        num_lines = count_lines(self._options.input, self._stop_counting)
        if num_lines is not None:
            which, num_shards = self._options.shard
            self._total = max(0, (num_lines - which + num_shards - 1) // num_shards)
