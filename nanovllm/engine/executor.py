"""Run steps in this process, alone or as rank 0 of a tensor-parallel group."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import SchedulerOutput, StepOutput
from nanovllm.engine.step_handle import StepHandle
from nanovllm.engine.worker import CALL, EACH, STEP, RunnerSpec, WorkerGroup
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.device import on_device
from nanovllm.utils.parallel import ParallelContext

_POLL_S = 0.5


class StepFuture(Protocol):
    """A launched step."""

    def wait(self) -> StepOutput: ...


class LocalExecutor:
    """The device side as the engine sees it, here on one device in this process."""

    _runner: ModelRunner | None = None

    def __init__(self, spec: RunnerSpec) -> None:
        self._device = spec.device(0)
        with on_device(self._device):
            self._runner = spec.build(ParallelContext.single())

    def init_kv_cache(self) -> int:
        """Allocate the KV cache on every rank; return its number of blocks."""
        return int(self.call("init_kv_cache"))

    def execute(self, output: SchedulerOutput) -> StepFuture:
        """Launch a step on every rank and return at once."""
        with on_device(self._device):
            return self._live_runner().execute(output)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of every rank's ModelRunner, with no step in flight; rank 0's result."""
        return self.call_rank_0(name, *args)

    def call_each(self, name: str, *args: Any) -> None:
        """As `call`, for what ranks do without each other: the first error is raised once all are
        through, and the ranks can go on.
        """
        self.call_rank_0(name, *args)

    def call_rank_0(self, name: str, *args: Any) -> Any:
        """Call a method of this process's ModelRunner only, which may raise and no worker dies."""
        with on_device(self._device):
            return getattr(self._live_runner(), name)(*args)

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with on_device(self._device):
                runner.close()

    def _live_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("The engine is closed. Build a new LLM.")
        return self._runner


class _WatchedStep:
    """A step of several ranks: waiting for it must end if one of them dies."""

    def __init__(self, handle: StepHandle, group: WorkerGroup) -> None:
        self._handle = handle
        self._group = group

    def wait(self) -> StepOutput:
        while not self._handle.is_ready_within(_POLL_S):
            self._group.check_alive()
        self._group.check_unbroken()
        return self._handle.wait()


class TensorParallelExecutor(LocalExecutor):
    """Rank 0 in this process and a worker process for every other rank.

    Every rank executes the same records, so all hold the same rows; only collectives connect them.
    """

    def __init__(self, spec: RunnerSpec, tp_size: int) -> None:
        self._device = spec.device(0)
        self._group = WorkerGroup(spec, tp_size)
        try:
            with on_device(self._device):
                self._runner = self._group.on_rank_0(lambda: spec.build(self._group.join()))
            self._group.collect()
        except BaseException:
            self.close()
            raise

    def execute(self, output: SchedulerOutput) -> StepFuture:
        work = partial(self.call_rank_0, "execute", output)
        step = self._group.together(STEP, output.to_bytes(), work)
        return _WatchedStep(step, self._group)

    def call(self, name: str, *args: Any) -> Any:
        work = partial(self.call_rank_0, name, *args)
        result = self._group.together(CALL, pickle.dumps((name, args)), work)
        self._group.collect()
        return result

    def call_each(self, name: str, *args: Any) -> None:
        errors: list[Exception] = []

        def work() -> None:  # cut short by an interrupt it leaves the ranks out of step
            for part in (partial(self.call_rank_0, name, *args), self._group.collect):
                try:
                    part()
                except Exception as error:
                    errors.append(error)

        self._group.together(EACH, pickle.dumps((name, args)), work)
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._group.close()
        super().close()
        parallel, self._group.parallel = self._group.parallel, ParallelContext.single()
        with on_device(self._device):
            parallel.close()


def make_executor(
    config: Config, model_config: ModelConfig, model_dir: Path, *, max_model_len: int
) -> LocalExecutor:
    """Build the executor that `config` asks for; weights are loaded when it returns."""
    spec = RunnerSpec(config, model_config, model_dir, max_model_len)
    if config.tensor_parallel_size == 1:
        return LocalExecutor(spec)
    return TensorParallelExecutor(spec, config.tensor_parallel_size)
