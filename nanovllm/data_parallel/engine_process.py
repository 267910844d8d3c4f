"""One engine in a process of its own: both ends of the pipe to it."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.config import Config
from nanovllm.llm import LLM
from nanovllm.metrics import Metrics, StepSample
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.environment import environment
from nanovllm.utils.interrupt import leave_signals_to_parent, signals_held_back
from nanovllm.utils.owner import Owner
from nanovllm.utils.processes import end_with_parent
from nanovllm.utils.remote_error import RemoteError

_REPORT_INTERVAL_S = 0.25
_STOP_TIMEOUT_S = 20.0
_LOOKAHEAD = 8  # one in so many sequences beyond what runs, ready for a row that comes free


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine found out when it started."""

    max_model_len: int
    num_cache_tokens: int


@dataclass(frozen=True, slots=True)
class RunItem:
    """A checked request on its way to an engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int


class EngineProcess:
    """Owns one engine's process and this end of its pipe."""

    def __init__(self, number: int, config: Config, variables: dict[str, str]) -> None:
        self.number = number
        self.metrics = Metrics()
        self.load = (0, 0, 0.0)  # running, waiting, KV use
        self.samples: list[StepSample] = []
        self.open: dict[str, int] = {}  # request id -> n, in the order given
        self.num_open_seqs = 0
        self.is_alive = True
        self.is_recalling = self.is_draining = False
        self.is_stopped = False  # as asked: it does not die
        self.failure: str | None = None
        self._capacity = config.max_num_seqs + -(-config.max_num_seqs // _LOOKAHEAD)
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_engine, args=(number, config, theirs), name=f"nanovllm-dp{number}"
        )
        # The child is born with them: set any later, torch has been imported.
        with environment(variables), signals_held_back():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def has_room(self) -> bool:
        return not self.open or self.num_open_seqs < self._capacity

    def take(self, request_id: str, num_seqs: int) -> None:
        """Note that the engine is about to be given a request."""
        self.open[request_id] = num_seqs
        self.num_open_seqs += num_seqs

    def forget(self, request_id: str) -> None:
        """Note that the engine no longer has a request."""
        self.num_open_seqs -= self.open.pop(request_id, 0)

    def forget_all(self) -> None:
        self.open.clear()
        self.num_open_seqs = 0

    def wait_until_ready(self) -> EngineFacts:
        """Wait for the engine to load; if it does not, its own error, or how it ended."""
        try:
            kind, payload = self.connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(
                f"{self.end()} Is the script's code under `if __name__ == '__main__':`?"
            ) from None
        if kind == "failed":
            error: RemoteError = payload
            self.end()
            raise error.rebuilt(f"Engine {self.number}")
        facts: EngineFacts = payload
        return facts

    def send(self, message: tuple[str, Any]) -> None:
        """Tell the engine something; nothing happens if it is gone."""
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> tuple[str, Any]:
        """The next message; an output message's figures are noted here. EOFError: it is gone."""
        kind, payload = self.connection.recv()
        if kind == "outputs":
            outputs, self.metrics, self.load, samples = payload
            self.samples += samples
            return kind, outputs
        return kind, payload

    def end(self) -> str:
        """Let go of a process that has died or failed; return what happened, as a sentence."""
        self.is_alive = False
        self.connection.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        how = (
            f"was killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
        )
        return f"Engine {self.number} {how}." + (f"\n{self.failure}" if self.failure else "")

    def kill(self) -> None:
        """End the process without asking it, as before it has begun to work."""
        self._process.kill()

    def ask_to_stop(self) -> None:
        self.is_stopped = True
        if self.is_alive:
            self.send(("stop", None))

    def close(self) -> None:
        """End the process, which was asked to stop. A second call does nothing."""
        if self.is_alive:
            self.end()


def close_all(owner: Owner, engines: list[EngineProcess]) -> None:
    """End the engines, all asked before one is waited for."""
    if not owner.is_here:
        return  # a fork ends, and they are not its engines
    for engine in engines:
        engine.ask_to_stop()
    for engine in engines:
        engine.close()


# ---- in the engine's process


def _run_engine(number: int, config: Config, connection: Connection) -> None:
    leave_signals_to_parent()
    end_with_parent()
    try:
        options = {k: v for k, v in asdict(config).items() if k != "model"}
        with LLM(config.model, **options) as llm:
            connection.send(("ready", EngineFacts(llm.max_model_len, llm.num_cache_tokens)))
            _Server(number, llm, connection).serve()
    except BaseException as error:
        with suppress(OSError):  # the parent is gone, which may be all that went wrong
            connection.send(("failed", RemoteError.of(error)))
        raise SystemExit(1) from None


class _Server:
    """Owns the other end of the pipe: takes requests, steps the engine, sends outputs."""

    def __init__(self, number: int, llm: LLM, connection: Connection) -> None:
        self._number = number
        self._llm = llm
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._samples: list[StepSample] = []

    def serve(self) -> None:
        """Work until the parent says stop or is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        last_report = 0.0
        outputs: list[RequestOutput] = []
        while self._obey():
            if not self._llm.is_finished():
                outputs += self._llm.step()
            is_due = time.monotonic() - last_report > _REPORT_INTERVAL_S
            if outputs or is_due or self._llm.is_finished():
                self._report(outputs)
                outputs = []
                last_report = time.monotonic()

    def _listen(self) -> None:
        # In a thread of its own, so that the parent's sends never wait for a step: both ends
        # writing into full pipes would wait for each other.
        with suppress(EOFError, OSError):
            while True:
                self._messages.put(self._connection.recv())
        self._messages.put(None)

    def _obey(self) -> bool:
        """Deal with all messages, waiting for one if there is nothing to do; False: stop."""
        while True:
            try:
                message = self._messages.get(block=self._llm.is_finished())
            except queue.Empty:
                return True
            if message is None or message[0] == "stop":
                return False
            kind, payload = message
            if kind == "run":
                for item in payload:
                    self._add(item)
            elif kind == "abort":
                self._llm.abort(payload)
            elif kind == "recall":
                self._connection.send(("returned", self._llm.give_up_waiting(payload)))
            else:
                assert kind == "observe", "the parent sends no other kinds"
                self._llm.observe_steps(self._sample if payload else None)

    def _add(self, item: RunItem) -> None:
        prompt = {"prompt": item.prompt, "prompt_token_ids": item.prompt_token_ids}
        params = item.params
        if params.seed is None:
            params = params.clone(seed=item.seed)
        self._llm.add_request(prompt, params, request_id=item.request_id)

    def _sample(self, sample: StepSample) -> None:
        self._samples.append(replace(sample, engine=self._number))

    def _report(self, outputs: list[RequestOutput]) -> None:
        samples, self._samples = self._samples, []
        payload = (outputs, self._llm.metrics, self._llm.load(), samples)
        self._connection.send(("outputs", payload))
