"""Tensor-parallel worker processes: how they start, what they do, how they end.

A worker ignores Ctrl-C, obeys rank 0, and ends when rank 0 is gone, however that happened. Rank 0
watches the workers while it waits, and raises with a worker's own traceback.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import tempfile
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import SchedulerOutput
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.channel import ChannelReceiver, ChannelSender
from nanovllm.utils.device import resolve_device, resolve_dtype
from nanovllm.utils.interrupt import leave_signals_to_parent, signals_held_back
from nanovllm.utils.owner import Owner, check_may_start_processes
from nanovllm.utils.parallel import ParallelContext, join_group
from nanovllm.utils.processes import ProcessWatch, end_processes, end_with_parent, in_thread

STEP, CALL, STOP = b"S", b"C", b"X"  # first byte of a message
_PATIENCE_S = 5.0  # for the end of a process that has closed its connections
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """All that a rank needs to build its ModelRunner."""

    config: Config
    model_config: ModelConfig
    model_dir: Path
    max_model_len: int

    def device(self, tp_rank: int) -> torch.device:
        return resolve_device(self.config.device, tp_rank)

    def join(self, store_path: str, tp_rank: int) -> ParallelContext:
        """Meet the other ranks at `store_path`."""
        size, device = self.config.tensor_parallel_size, self.device(tp_rank)
        use_peers = self.config.enable_custom_all_reduce
        return join_group(store_path, tp_rank, size, device, use_peers=use_peers)

    def build(self, parallel: ParallelContext) -> ModelRunner:
        device = self.device(parallel.tp_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dtype = resolve_dtype(self.config.dtype, self.model_config.dtype, device)
        return ModelRunner(
            self.config,
            self.model_config,
            self.model_dir,
            max_model_len=self.max_model_len,
            parallel=parallel,
            device=device,
            dtype=dtype,
        )


class WorkerGroup:
    """Owns the worker processes, the channel to them and the meeting place of all ranks."""

    def __init__(self, spec: RunnerSpec, tp_size: int) -> None:
        check_may_start_processes("LLM(tensor_parallel_size > 1)")
        self._spec = spec
        # Readable by this user only.
        directory = tempfile.mkdtemp(prefix="nanovllm-")
        self._store_path = str(Path(directory) / "store")
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._commands: list[Connection] = []
        self._replies: list[Connection] = []
        self._sender: ChannelSender | None = None
        self.parallel = ParallelContext.single()  # until rank 0 joins
        self._watch: ProcessWatch | None = None
        self._is_out_of_step = False
        self._finalizer = weakref.finalize(
            self, end_processes, Owner("LLM"), self._processes, self._commands, directory
        )
        # Registered last, so called first: multiprocessing would wait for the workers for ever.
        atexit.register(self._finalizer)
        try:
            for rank in range(1, tp_size):
                commands, worker_commands = context.Pipe()
                replies, worker_replies = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_worker,
                    args=(spec, rank, tp_size, self._store_path, worker_commands, worker_replies),
                    name=f"nanovllm-tp{rank}",
                    daemon=True,
                )
                with signals_held_back():
                    process.start()
                worker_commands.close()
                worker_replies.close()
                self._processes.append(process)
                self._commands.append(commands)
                self._replies.append(replies)
            self.collect()  # every worker is up, before rank 0 waits for them
        except BaseException:
            self._is_out_of_step = True
            self.close()
            raise
        pids = [process.pid or 0 for process in self._processes]
        self._sender = ChannelSender(self._commands, pids)

    def join(self) -> ParallelContext:
        """Meet the workers; call once, on rank 0. From then on one that ends ends collectives."""
        join = partial(self._spec.join, self._store_path, 0)
        self.parallel = in_thread(join, while_waiting=self.check_alive)
        self._watch = ProcessWatch(self._processes, self.parallel.abort)
        return self.parallel

    def send(self, kind: bytes, payload: bytes) -> None:
        assert self._sender is not None
        if self._is_out_of_step:
            self.check_alive()
            # Its next collective would meet one of the workers' last step, and give wrong tokens.
            raise RuntimeError(
                "A fault in the middle of a step left the tensor-parallel ranks out of step. "
                "Close this LLM and build a new one."
            )
        try:
            self._sender.send(kind + payload, self.check_alive)
        except OSError:  # the reading end is gone: say why
            self.check_alive(patience_s=_PATIENCE_S)
            raise

    def collect(self) -> None:
        """Wait until every worker has replied to the last command."""
        for replies in self._replies:
            while not replies.poll(0.2):
                self.check_alive()
            try:
                self._read_reply(replies)
            except EOFError:
                self.check_alive(patience_s=_PATIENCE_S)
                raise

    def together(self, kind: bytes, payload: bytes, work: Callable[[], _T]) -> _T:
        """Send a command, and do rank 0's share of it."""

        def both() -> _T:
            self.send(kind, payload)
            return work()

        return self.on_rank_0(both)  # an interrupt between the two breaks their step too

    def on_rank_0(self, work: Callable[[], _T]) -> _T:
        """Do rank 0's share of what the workers do; if it fails since one of them died, say so."""
        try:
            return work()
        except BaseException as error:
            self._is_out_of_step = True
            if isinstance(error, RuntimeError):
                self.check_alive(patience_s=_PATIENCE_S)
            raise

    def check_unbroken(self) -> None:
        """Raise if a rank has ended since all met: what a step gave then means nothing."""
        if self._watch is not None and self._watch.has_fired:
            self.check_alive(patience_s=_PATIENCE_S)

    def check_alive(self, patience_s: float = 0.0) -> None:
        """Raise with a worker's traceback if one has failed or ended."""
        for rank, process in enumerate(self._processes, 1):
            replies = self._replies[rank - 1]
            process.join(patience_s)
            if process.is_alive():
                continue
            while replies.poll():
                try:
                    self._read_reply(replies)
                except EOFError:
                    break
            raise RuntimeError(
                f"Tensor-parallel worker {rank} ended with exit code {process.exitcode} "
                "(negative: killed by that signal). The engine must be closed. If it ended at "
                "start-up, is the script's code under `if __name__ == '__main__':`?"
            )

    def close(self) -> None:
        """End the workers, gently first. A second call does nothing."""
        if self._is_out_of_step:
            for process in self._processes:
                process.kill()  # it may wait in a collective for a rank that will not come
        elif self._watch is not None:
            self._watch.stop()
        if self._sender is not None:
            try:
                if all(process.is_alive() for process in self._processes):
                    self._sender.send(STOP, lambda: None)
            except (OSError, ValueError):
                pass  # gone already
            self._sender.close()
            self._sender = None
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _read_reply(self, replies: Connection) -> None:
        error = replies.recv()
        if error is not None:
            rank = self._replies.index(replies) + 1
            raise RuntimeError(f"Tensor-parallel worker {rank} failed:\n{error}")


# ---- in the worker process


def _run_worker(
    spec: RunnerSpec,
    tp_rank: int,
    tp_size: int,
    store_path: str,
    commands: Connection,
    replies: Connection,
) -> None:
    leave_signals_to_parent()
    end_with_parent(Path(store_path).parent)
    torch.set_num_threads(max(1, torch.get_num_threads() // tp_size))
    receiver = ChannelReceiver(commands, tp_rank - 1, tp_size - 1)
    try:
        replies.send(None)
        parallel = spec.join(store_path, tp_rank)
        runner = spec.build(parallel)
        replies.send(None)
        _serve(runner, receiver, replies)
        runner.close()
        parallel.close()
    except (EOFError, BrokenPipeError):
        pass  # rank 0 is gone
    except BaseException:
        replies.send(traceback.format_exc())
        replies.close()
        raise SystemExit(1) from None
    finally:
        receiver.close()


def _serve(runner: ModelRunner, receiver: ChannelReceiver, replies: Connection) -> None:
    in_flight: deque[Any] = deque()
    while True:
        message = receiver.receive()
        kind, payload = message[:1], memoryview(message)[1:]
        if kind == STEP:
            in_flight.append(runner.execute(SchedulerOutput.from_bytes(payload)))
            # Not further ahead of the device than rank 0: staging buffers are reused.
            while len(in_flight) > 2:
                in_flight.popleft().wait()
        elif kind == CALL:
            # Only this engine's rank 0 can write here: the memory has no name, the socket no path.
            name, args = pickle.loads(payload)
            getattr(runner, name)(*args)
            replies.send(None)
        else:
            return
