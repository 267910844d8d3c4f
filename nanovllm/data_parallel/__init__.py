"""Several engines on one machine behind the interface of one: `DataParallelLLM`.

Requests are numbered, tokenised and checked here, as in one engine, and wait in one queue here.
An engine is given what it can run at once and a little more, so that none idles while another has
work.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import fields
from threading import Event
from typing import Any, NoReturn

import torch

from nanovllm.chat import chat_prompts
from nanovllm.config import Config
from nanovllm.data_parallel.engine_process import EngineFacts, EngineProcess, close_all
from nanovllm.data_parallel.job import Job
from nanovllm.data_parallel.placement import engine_environments
from nanovllm.frontend.prompts import prompt_list
from nanovllm.frontend.request_builder import Limits, RequestBuilder, params_list
from nanovllm.frontend.start_up import ModelFiles, checked_on, read_model
from nanovllm.generation_defaults import default_sampling_params
from nanovllm.lazy import checked_window, paired
from nanovllm.llm import LLM
from nanovllm.metrics import Metrics, StepSample
from nanovllm.outputs import RequestOutput
from nanovllm.read_ahead import AllAtOnce, ReadAhead
from nanovllm.run_requests import NOTHING_STARTED, checked, warn_if_cut
from nanovllm.sampling_params import CALL_ADVICE, SamplingParams
from nanovllm.utils.checks import check_bool, check_callable, check_int, hint_unknown_keywords
from nanovllm.utils.interrupt import InterruptFlag
from nanovllm.utils.owner import AtExit, Owner, check_may_start_processes
from nanovllm.utils.progress import Progress

_CHUNK = 128  # prompts tokenised at once, in a thread while the engines work


def open_llm(
    model: str | os.PathLike[str], data_parallel_size: int, options: dict[str, Any]
) -> LLM | DataParallelLLM:
    """One engine in this process, or several in processes of their own."""
    if data_parallel_size == 1:
        return LLM(model, **options)
    return DataParallelLLM(model, data_parallel_size=data_parallel_size, **options)


class DataParallelLLM:
    """`data_parallel_size` engines, each a process with a GPU of its own, or several for its ranks.

    Owns the processes; close it, or use it in a `with` block. A process that dies has its requests
    given to the others, and `faults` says so. Python logits processors are refused.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, data_parallel_size: int, **options: Any
    ) -> None:
        size = check_int("data_parallel_size", data_parallel_size, minimum=1)
        self._config = config = Config.from_options(model, options)
        check_may_start_processes("DataParallelLLM")
        self._owner = Owner("DataParallelLLM")
        self.faults: list[str] = []  # what to tell the user about engines that died
        self._sink: Callable[[StepSample], None] | None = None
        self._is_running = self._is_at_end = False
        # What is wrong for every engine is told here, before any starts.
        self._files = read_model(config)
        checked_on(torch.device("cpu"), config, self._files.model_config)
        self._engines: list[EngineProcess] = []
        self._finalizer = weakref.finalize(self, close_all, self._owner, self._engines)
        # Registered last, so called first: multiprocessing would wait for the processes for ever.
        self._at_exit = AtExit(self._end)
        try:
            for number, variables in enumerate(engine_environments(config, size)):
                self._engines.append(EngineProcess(number, config, variables))
            facts = [engine.wait_until_ready() for engine in self._engines]
        except BaseException:
            for engine in self._engines:
                engine.kill()
            self.close()
            raise
        self.max_model_len = min(item.max_model_len for item in facts)
        self._builder = _make_builder(self._files, facts, config.seed)

    # ---- what LLM has

    @hint_unknown_keywords("generate has no option", CALL_ADVICE)
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """As `LLM.generate`: the same outputs in the same order, from all engines."""
        self._check_ready()
        items, _ = prompt_list(prompts)
        return self._answers(items, sampling_params, use_tqdm, return_errors)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        return_errors: bool = False,
        **layout: Any,
    ) -> list[RequestOutput]:
        """As `LLM.chat`; `layout` is its options from `add_generation_prompt` to `tools`."""
        self._check_ready()
        prompts = chat_prompts(self.get_tokenizer(), messages, **layout)
        # The template has written the special tokens: no second BOS.
        return self._answers(
            prompts, sampling_params, use_tqdm, return_errors, add_special_tokens=False
        )

    def _answers(
        self,
        items: list[Any],
        sampling_params: Any,
        use_tqdm: bool | Callable[..., Any],
        return_errors: bool,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        check_bool("return_errors", return_errors)
        params = params_list(self._params_or_default(sampling_params), len(items))
        built = self._builder.build(items, params, add_special_tokens=add_special_tokens)
        if not return_errors:
            checked(built, advice=NOTHING_STARTED)
        outputs: dict[int, RequestOutput] = {}
        # Closed at once when this is left: a traceback that is kept would keep it open.
        run = closing(self._run(lambda _: AllAtOnce(built), window=len(items) + 1, drain=None))
        with Progress(use_tqdm, len(items)) as progress, run as results:
            for index, output in results:
                outputs[index] = output
                progress.show_finished(len(output.prompt_token_ids), output.num_output_tokens)
                progress.show_state(*self.load())
        warn_if_cut(outputs.values(), params)
        return [outputs[index] for index in range(len(items))]

    @hint_unknown_keywords("generate_iter has no option", CALL_ADVICE)
    def generate_iter(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        window: int | None = None,
        drain: Event | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """As `LLM.generate_iter`; `window` counts the requests of all engines."""
        self._check_ready()
        pairs = paired(prompts, self._params_or_default(sampling_params))

        def start(on_ready: Callable[[], None]) -> ReadAhead:
            return ReadAhead(self._builder, pairs, _CHUNK, on_ready=on_ready)

        num_alive = max(sum(engine.is_alive for engine in self._engines), 1)
        default = 4 * self._config.max_num_seqs * num_alive
        window = checked_window(window, drain, default=default)
        return self._run(start, window=window, drain=drain)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer. ValueError where it has none."""
        if self._builder.tokenizer is None:
            raise ValueError(f"{self._files.directory} has no tokenizer.")
        return self._builder.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config asks for."""
        return default_sampling_params(self._files.directory)

    def _params_or_default(self, sampling_params: Any) -> Any:
        return self.get_default_sampling_params() if sampling_params is None else sampling_params

    def observe_steps(self, sink: Callable[[StepSample], None] | None) -> None:
        """Call `sink` with what each step of each engine did, a moment later; None: no more."""
        check_callable("sink", sink)
        self._sink = sink
        for engine in self._engines:
            if engine.is_alive:
                engine.send(("observe", sink is not None))

    def _on_sample(self, sample: StepSample) -> None:
        if self._sink is not None:
            self._sink(sample)

    @property
    def metrics(self) -> Metrics:
        """The counters of all engines added up, as of their last reports."""
        total = Metrics()
        for item in fields(Metrics):
            values = (getattr(engine.metrics, item.name) for engine in self._engines)
            setattr(total, item.name, sum(values))
        return total

    def load(self) -> tuple[int, int, float]:
        """Sequences running and waiting in all engines, and the mean share of KV blocks in use."""
        loads = [engine.load for engine in self._engines if engine.is_alive] or [(0, 0, 0.0)]
        running, waiting, kv_use = zip(*loads, strict=True)
        return sum(running), sum(waiting), sum(kv_use) / len(loads)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the engines that are alive."""
        return [engine.pid for engine in self._engines if engine.is_alive]

    def close(self) -> None:
        """End the engines. A second call does nothing."""
        self._finalizer()
        self._at_exit.cancel()

    def __enter__(self) -> DataParallelLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse copies: an engine has one parent."""
        raise TypeError("A DataParallelLLM cannot be copied or pickled. Build one there.")

    # ---- the loop

    def _end(self) -> None:
        """Close before the interpreter ends; a daemon thread that is in a call ends with it."""
        self._is_at_end = True
        self.close()

    def _check_ready(self) -> None:
        self._owner.check()
        if self._is_at_end and threading.current_thread() is not threading.main_thread():
            raise SystemExit  # which ends a thread without a word
        if not self._finalizer.alive:
            raise RuntimeError("This DataParallelLLM is closed. Build a new one.")

    def _run(
        self,
        start: Callable[[Callable[[], None]], ReadAhead | AllAtOnce],
        *,
        window: int,
        drain: Event | None,
    ) -> Generator[tuple[int, RequestOutput]]:
        self._owner.check()
        if self._is_running:
            raise RuntimeError("One generate at a time: finish or close the last generate_iter.")
        job = Job(self._engines, self._config.seed, faults=self.faults, on_sample=self._on_sample)
        num_read, is_drained, is_reading = 0, False, True
        error: BaseException | None = None
        # A message to or from an engine that Ctrl-C cut in half would make the next one garbage.
        interrupt = InterruptFlag()
        with interrupt:
            woken, waker = multiprocessing.Pipe(duplex=False)
            ahead = start(lambda: waker.send(None))
            self._is_running = True
        try:
            if interrupt.count:
                raise KeyboardInterrupt
            while is_reading or job.open:
                results: list[tuple[int, RequestOutput]] = []
                with interrupt:
                    if drain is not None and drain.is_set() and not is_drained:
                        is_reading, is_drained = False, True
                        job.drop_waiting()
                    while is_reading and not results and len(job.open) < window:
                        if not (chunk := ahead.take(0)):
                            break
                        is_reading, error = not chunk.is_last, chunk.error
                        results += job.take_in(chunk.built, num_read)
                        num_read += len(chunk.built)
                    job.hand_out(is_complete=not is_reading)
                    if not results and (is_reading or job.open):
                        self._check_ready()
                        results += job.receive(woken)
                if interrupt.count:
                    raise KeyboardInterrupt
                yield from results
            if error is not None:
                raise error
        finally:
            self._is_running = False
            try:
                with interrupt:
                    ahead.close()
                    job.give_up()
                    woken.close()
                    waker.close()
            finally:
                if interrupt.count > 1:  # it struck at once, and nobody knows what
                    self.close()


def _make_builder(files: ModelFiles, facts: list[EngineFacts], seed: int) -> RequestBuilder:
    """The builder of requests that any of the engines can take."""
    limits = Limits(
        min(item.max_model_len for item in facts),
        min(item.num_cache_tokens for item in facts),
        files.model_config.vocab_size,
        allows_processors=False,
    )
    return RequestBuilder(
        files.tokenizer, limits, files.eos_ids, seed, is_taken=lambda request_id: False
    )
