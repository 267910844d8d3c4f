"""The step loop: admission, launching ahead of results, faults, abort and close."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.executor import StepFuture, make_executor
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.engine.step import SchedulerOutput
from nanovllm.frontend.file_stamps import check_unchanged
from nanovllm.frontend.output_processor import OutputProcessor, Request
from nanovllm.frontend.request_builder import Limits, RequestBuilder
from nanovllm.frontend.start_up import (
    checked_on,
    memory_errors_named,
    read_model,
    step_memory_errors_named,
)
from nanovllm.frontend.weight_update import replace_weights, weight_list
from nanovllm.metrics import Metrics, Stopwatch
from nanovllm.outputs import RequestOutput
from nanovllm.utils.checks import check_int
from nanovllm.utils.device import resolve_device
from nanovllm.utils.exclusive import Exclusive
from nanovllm.utils.owner import AtExit, Owner, never_free

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way: what was asked for and where its tokens will come out."""

    output: SchedulerOutput
    future: StepFuture


class LLMEngine:
    """Owns the steps in flight and the parts that steps pass through, in one thread at a time."""

    def __init__(self, config: Config) -> None:
        self._owner = Owner("LLM")
        self.metrics = Metrics()
        self.on_step: Callable[[Metrics, tuple[int, int, float]], None] | None = None
        files = read_model(config)
        device = resolve_device(config.device)
        model_config = checked_on(device, config, files.model_config)
        overlap = config.enable_overlap
        self._enable_overlap = device.type == "cuda" if overlap is None else overlap
        self.config = config
        self.model_config = model_config
        self.model_dir = files.directory
        self._files = files
        with memory_errors_named(config):
            self._executor = make_executor(
                config, model_config, files.directory, max_model_len=files.max_len
            )
            try:
                self._build(self._executor.init_kv_cache())
            except BaseException:
                self._executor.close()
                raise
        self._at_exit = AtExit(self._end)

    def _build(self, num_blocks: int) -> None:
        """Make the host's side of the engine around a device side that is ready."""
        config, files = self.config, self._files
        num_cache_tokens = num_blocks * config.kvcache_block_size
        self.max_model_len = self._bounded_len(files.max_len, num_cache_tokens)
        limits = Limits(
            self.max_model_len,
            num_cache_tokens,
            self.model_config.vocab_size,
            allows_processors=config.tensor_parallel_size == 1,
        )
        self._num_blocks = num_blocks
        self.scheduler = self._make_scheduler()
        self.builder = RequestBuilder(
            files.tokenizer, limits, files.eos_ids, config.seed, is_taken=self._is_taken
        )
        self.processor = OutputProcessor(files.tokenizer)
        self._exclusive = Exclusive()
        self._in_flight: deque[_Launched] = deque()
        self._unclaimed: list[RequestOutput] = []
        self._num_preemptions = 0  # by schedulers before a fault
        self.is_closed = self._is_at_end = False
        self._sleep_level = 0  # 0: awake

    def _make_scheduler(self) -> Scheduler:
        config, files = self.config, self._files
        blocks = BlockManager(
            self._num_blocks,
            config.kvcache_block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            root_hash=files.root_hash,
        )
        return Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=files.max_len,
            eos_token_ids=files.eos_ids,
            vocab_size=self.model_config.vocab_size,
            enable_request_reordering=config.enable_request_reordering,
        )

    @property
    def tokenizer(self) -> Any | None:
        return self.builder.tokenizer

    def _bounded_len(self, max_len: int, num_cache_tokens: int) -> int:
        if max_len <= num_cache_tokens:
            return max_len
        if self.config.max_model_len is None:
            logger.info(
                "max_model_len is %d: what the KV cache holds (the model: %d)",
                num_cache_tokens,
                max_len,
            )
            return num_cache_tokens
        logger.warning(
            "max_model_len is %d, but the KV cache holds %d tokens: longer sequences end there "
            "with finish_reason 'length'",
            max_len,
            num_cache_tokens,
        )
        return max_len

    def add(self, requests: list[Request]) -> None:
        """Queue checked requests."""
        self.check_ready()
        with self._exclusive.use():
            for request in requests:
                if request.request_id in self.processor.requests:
                    raise ValueError(
                        f"request_id {request.request_id!r} is in use. Choose another."
                    )
            try:
                for request in requests:
                    self.processor.add(request)
                    self.scheduler.add(request.seqs)
            except BaseException:
                for request in requests:
                    self.processor.requests.pop(request.request_id, None)
                self._recover()
                raise
            self.metrics.num_requests += len(requests)

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self.processor.requests or any(
            output.request_id == request_id for output in self._unclaimed
        )

    def has_unfinished(self) -> bool:
        return bool(self._unclaimed or self.processor.requests)

    def check_any_open(self, request_ids: Iterable[str]) -> None:
        """RuntimeError if all are gone: who waits for them would step for ever."""
        if not any(map(self._is_taken, request_ids)):
            raise RuntimeError(
                "The requests of this call are gone: step() or abort() was called between its "
                "steps, as by an observer, a progress bar, or who takes a generator's results."
            )

    def step(self) -> list[RequestOutput]:
        """Launch the next step, bring one in, and return requests that finished (or streamed)."""
        self._check_open()
        with self._exclusive.use(is_step=True):
            try:
                with step_memory_errors_named(self.config.tensor_parallel_size):
                    self._step()
            except BaseException:
                self._recover()
                raise
        if self.on_step is not None:
            self.on_step(self.metrics, self.load())
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def check_ready(self) -> None:
        """RuntimeError where no request can run: in a fork, closed, or asleep."""
        self._check_open()
        if self._sleep_level:
            raise RuntimeError("The engine sleeps. Call wake_up first.")

    def claim(self) -> AbstractContextManager[None]:
        """Keep other threads out for as long as the `with` block lasts; refused if one is in."""
        self._check_open()
        return self._exclusive.use()

    def keep_for_later(self, outputs: list[RequestOutput]) -> None:
        """Hold outputs that nobody in this call asked for; the next `step` returns them."""
        self._unclaimed += outputs

    def abort(self, request_ids: list[str]) -> list[RequestOutput]:
        """End requests where they stand and free what they hold; unknown ids are ignored."""
        ids = set(request_ids)
        if self.is_closed:
            return self._abort(request_ids, ids)
        if not any(map(self._is_taken, ids)):
            return []  # nothing to end: no need to wait for who uses the engine
        with self._exclusive.use(waits=True):
            try:
                return self._abort(request_ids, ids)
            except BaseException:  # a Ctrl-C: what was to end must not go on
                for request_id in ids:
                    self.processor.requests.pop(request_id, None)
                self._recover()
                raise

    def _abort(self, request_ids: list[str], ids: set[str]) -> list[RequestOutput]:
        outputs = [output for output in self._unclaimed if output.request_id in ids]
        self._unclaimed = [output for output in self._unclaimed if output.request_id not in ids]
        for request_id in request_ids:
            request = self.processor.requests.get(request_id)
            if request is None:
                continue
            for seq in request.seqs:
                self.scheduler.finish(seq, "abort")
            output = self.processor.abort(request_id)
            if output is not None:
                outputs.append(output)
        return outputs

    def give_up_waiting(self, max_num_requests: int | None = None) -> list[str]:
        """Abort requests of which nothing has run yet, last come first; return their ids."""
        with self._exclusive.use():
            untouched = [
                request_id
                for request_id, request in reversed(self.processor.requests.items())
                if all(
                    seq.status is SequenceStatus.WAITING and seq.num_preemptions == 0
                    for seq in request.seqs
                )
            ][:max_num_requests]
            self.abort(untouched)
        return untouched

    def load(self) -> tuple[int, int, float]:
        """Sequences running and waiting, and the share of KV blocks in use."""
        blocks = self.scheduler.blocks
        kv_use = 1 - blocks.num_free_blocks / blocks.num_blocks
        return self.scheduler.num_running, len(self.scheduler.waiting), kv_use

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, whose KV new weights would not give."""
        with self._exclusive.use():
            self._check_idle("reset_prefix_cache")
            self.scheduler.blocks.reset_prefix_index()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace weights in place on every rank; all are checked before any is changed."""
        self._check_idle("load_weights")
        # Before the engine is held: reading an iterable may take long, or use the engine.
        checked = weight_list(weights)
        with self._exclusive.use():
            self._check_idle("load_weights")
            self.check_ready()
            try:
                replace_weights(self._executor, checked, self.config.tensor_parallel_size)
            finally:  # if it fails in the middle, some have changed
                self.scheduler.blocks.reset_prefix_index()

    def sleep(self, level: int) -> None:
        """Free the KV cache (level 1), and the weights (level 2), on every rank."""
        advice = "1 frees the KV cache, 2 the weights too."
        level = check_int("level", level, minimum=1, maximum=2, advice=advice)
        with self._exclusive.use():
            self._check_idle("sleep")
            if level > self._sleep_level:
                self._sleep_level = level  # first: if it fails halfway, `wake_up` restores all
                self.scheduler.blocks.reset_prefix_index()
                self._executor.call_each("sleep", level)

    def wake_up(self) -> None:
        """Undo `sleep`; awake already, nothing happens."""
        self._check_open()
        with self._exclusive.use():
            if self._sleep_level:
                if self._sleep_level == 2:
                    check_unchanged(self._files.stamps, self.config, self.model_dir)
                try:
                    self._executor.call_each("wake_up")
                    self._executor.call("make_ready")
                except BaseException as error:  # the next try must not take for loaded what is not
                    traceback.clear_frames(error.__traceback__)  # which hold what was read
                    with suppress(RuntimeError):  # a dead rank's: the first error says more
                        self._executor.call_each("sleep", self._sleep_level)
                    raise
                self._sleep_level = 0

    def close(self) -> None:
        """Free the device's memory and end the workers. A second call does nothing.

        A step that another thread is in may end first, for 10 s; its call raises RuntimeError then.
        """
        if not self.is_closed:
            self.is_closed = True  # a call in another thread ends before its next step
            self._at_exit.cancel()
            if not self._owner.is_here:  # a fork that drops its copy must not end the workers
                never_free(self._executor)
                return
            with self._exclusive.after_others():
                self._in_flight.clear()
                self._executor.close()

    def _end(self) -> None:
        """Close before the interpreter ends: it kills daemon threads, inside torch the program."""
        self._is_at_end = True
        self.close()
        self._exclusive.wait_for_holder()

    # ---- one step

    def _step(self) -> None:
        watch = Stopwatch()
        output = self.scheduler.schedule()
        self.metrics.schedule_s += watch.lap()
        if output is not None:
            self._in_flight.append(self.launched(output))
            self.metrics.launch_s += watch.lap()
        num_kept = 1 if output is not None and self._may_run_ahead(output) else 0
        while len(self._in_flight) > num_kept:
            self._bring_in(self._in_flight.popleft())

    def launched(self, output: SchedulerOutput) -> _Launched:
        """Launch a step and count it."""
        num_prefill_tokens = 0 if output.prefill is None else len(output.prefill.token_ids)
        self.metrics.count_step(num_prefill_tokens, output.num_decode_rows)
        self.metrics.num_preemptions = self._num_preemptions + self.scheduler.num_preemptions
        return _Launched(output, self._executor.execute(output))

    def _may_run_ahead(self, output: SchedulerOutput) -> bool:
        # A Python processor reads the last token on the host before the next one is drawn.
        return self._enable_overlap and not output.processor_calls

    def _bring_in(self, launched: _Launched) -> None:
        watch = Stopwatch()
        step_output = launched.future.wait()
        self.metrics.wait_s += watch.lap()
        updates = self.scheduler.update(launched.output, step_output)
        outputs, stopped = self.processor.process(updates, step_output)
        for seq, stop in stopped:
            self.scheduler.finish(seq, "stop", stop)
        self.metrics.num_output_tokens += updates.num_new_tokens
        self._keep(outputs)
        self.metrics.update_s += watch.lap()

    def _keep(self, outputs: list[RequestOutput]) -> None:
        """Take outputs from the processor for the next return, so that no fault loses them."""
        self._unclaimed += outputs
        self.processor.forget(outputs)
        for output in outputs:
            if output.finished:
                self.metrics.count_finished(output)

    def _recover(self) -> None:
        """After a fault: nothing is in flight, and all open requests wait to run again.

        It may have struck between any two lines, so the scheduler's books are begun anew.
        """
        try:
            self._in_flight.clear()
            self._num_preemptions += self.scheduler.num_preemptions
            self.scheduler = self._make_scheduler()
            self.processor.forget(self._unclaimed)
            seqs, outputs = self.processor.restart()
            self._keep(outputs)
            self.scheduler.add(seqs)
        except BaseException:
            self.close()  # what cannot be put right must not go on
            raise

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self.has_unfinished():
            ids = {*self.processor.requests, *(output.request_id for output in self._unclaimed)}
            raise RuntimeError(
                f"{name} needs an idle engine: {len(ids)} request(s) are open. "
                "Take their outputs from step, or abort them first."
            )
        while self._in_flight:  # a last step may still be running for rows that ended
            self._bring_in(self._in_flight.popleft())

    def _check_open(self) -> None:
        self._owner.check()
        if self._is_at_end and threading.current_thread() is not threading.main_thread():
            raise SystemExit  # which ends a thread without a word
        if self.is_closed:
            raise RuntimeError("The engine is closed. Build a new LLM.")
