"""Tensor-parallel worker processes: how they start, what they do, how they end.

A worker ignores Ctrl-C, obeys rank 0, and ends when rank 0 is gone, however that happened. Rank 0
watches the workers while it waits, and raises with a worker's own traceback.
"""

from __future__ import annotations

import pickle
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import SchedulerOutput
from nanovllm.layers.placement import Placement
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.channel import ChannelReceiver, ChannelSender
from nanovllm.utils.child_group import PATIENCE_S, ChildGroup
from nanovllm.utils.device import on_device, resolve_device, resolve_dtype
from nanovllm.utils.interrupt import leave_signals_to_parent
from nanovllm.utils.owner import Owner, check_may_start_processes
from nanovllm.utils.parallel import ParallelContext, join_group
from nanovllm.utils.processes import (
    ProcessWatch,
    end_with_parent,
    in_thread,
    remove_if_orphaned,
)
from nanovllm.utils.remote_error import RemoteError

# First byte of a message. EACH calls what no rank needs another for: one that fails lives on.
STEP, CALL, EACH, STOP = b"S", b"C", b"E", b"X"
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
        dtype = resolve_dtype(self.config.dtype, self.model_config.dtype, device)
        place = Placement(parallel, device, dtype)
        return ModelRunner(
            self.config, self.model_config, self.model_dir, place, max_model_len=self.max_model_len
        )


class WorkerGroup:
    """Owns the worker processes, the channel to them and the meeting place of all ranks."""

    def __init__(self, spec: RunnerSpec, tp_size: int) -> None:
        check_may_start_processes("LLM(tensor_parallel_size > 1)")
        self._spec = spec
        self._children = ChildGroup("Tensor-parallel worker", Owner("LLM"))
        self._processes = self._children.processes
        self._store_path = str(self._children.directory / "store")
        self._sender: ChannelSender | None = None
        self.parallel = ParallelContext.single()  # until rank 0 joins
        self._watch: ProcessWatch | None = None
        self._is_out_of_step = False
        self.collect, self.check_alive = self._children.collect, self._children.check_alive
        try:
            for _ in range(1, tp_size):
                self._children.start(
                    _run_worker, spec, tp_size, self._store_path, name="nanovllm-tp"
                )
            self.collect()  # every worker is up, before rank 0 waits for them
        except BaseException:
            self._is_out_of_step = True
            self.close()
            raise
        self._sender = ChannelSender(self._children.commands, self._children.pids)

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
            self.check_alive(patience_s=PATIENCE_S)
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
                self.check_alive(patience_s=PATIENCE_S)
            raise

    def check_unbroken(self) -> None:
        """Raise if a rank has ended since all met: what a step gave then means nothing."""
        if self._watch is not None and self._watch.has_fired:
            self.check_alive(patience_s=PATIENCE_S)

    def close(self) -> None:
        """End the workers, gently first. A second call does nothing."""
        if self._is_out_of_step:
            self._children.kill()  # one may wait in a collective for a rank that will not come
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
        self._children.close()


# ---- in the worker process


def _run_worker(
    tp_rank: int,
    commands: Connection,
    replies: Connection,
    spec: RunnerSpec,
    tp_size: int,
    store_path: str,
) -> None:
    leave_signals_to_parent()
    directory = Path(store_path).parent
    end_with_parent(directory)
    torch.set_num_threads(max(1, torch.get_num_threads() // tp_size))
    receiver = ChannelReceiver(commands, tp_rank - 1, tp_size - 1)
    try:
        replies.send(None)
        with on_device(spec.device(tp_rank)):
            parallel = spec.join(store_path, tp_rank)
            runner = spec.build(parallel)
            replies.send(None)
            _serve(runner, receiver, replies)
            runner.close()
            parallel.close()
    except (EOFError, BrokenPipeError):
        pass  # rank 0 is gone
    except BaseException as error:
        with suppress(OSError):  # rank 0 is gone, and this is what its end did to a collective
            replies.send(RemoteError.of(error))
        replies.close()
        remove_if_orphaned(directory)
        raise SystemExit(1) from None
    finally:
        receiver.close()
    # Killed, by now or while it stops us, rank 0 has no time for it.
    shutil.rmtree(directory, ignore_errors=True)


def _serve(runner: ModelRunner, receiver: ChannelReceiver, replies: Connection) -> None:
    in_flight: deque[Any] = deque()
    while True:
        message = receiver.receive()
        kind, payload = message[:1], memoryview(message)[1:]
        if kind == STEP:
            in_flight.append(runner.execute(SchedulerOutput.from_bytes(payload)))
            # Not further ahead of the device than rank 0: the output buffers are reused.
            while len(in_flight) > 2:
                in_flight.popleft().wait()
        elif kind in (CALL, EACH):
            # Only this engine's rank 0 can write here: the memory has no name, the socket no path.
            name, args = pickle.loads(payload)
            reply = None
            try:
                getattr(runner, name)(*args)
            except Exception as error:
                if kind == CALL:
                    raise  # others may wait for this rank: its end is what ends that
                reply = RemoteError.of(error)
            replies.send(reply)
        else:
            return
