"""One call's requests: which wait, which engine has which, and what a dead engine leaves."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from nanovllm.data_parallel.engine_process import EngineProcess, RunItem
from nanovllm.frontend.output_processor import Request
from nanovllm.frontend.request_builder import BadPrompt, derived_seed
from nanovllm.metrics import StepSample
from nanovllm.outputs import RequestOutput
from nanovllm.run_requests import error_output

logger = logging.getLogger(__name__)

_MAX_DEATHS = 3  # after so many engines died under it a request is given up
_POLL_S = 0.5


@dataclass(slots=True)
class _Open:
    """A request that has no output yet."""

    index: int
    request: Request
    seed: int
    num_deaths: int = 0

    def run_item(self) -> RunItem:
        """The request as it goes to an engine."""
        request = self.request
        ids, params = request.prompt_token_ids, request.params
        return RunItem(request.request_id, request.prompt, ids, params, self.seed)


class Job:
    """Owns the queue of one call, and knows the place of each request that has no output yet."""

    def __init__(
        self,
        engines: list[EngineProcess],
        seed: int,
        *,
        faults: list[str],
        on_sample: Callable[[StepSample], None],
    ) -> None:
        self._engines = engines
        self._seed = seed  # from which requests without one get theirs
        self._faults = faults  # what to tell the user about engines that died
        self._on_sample = on_sample
        self._waiting: deque[_Open] = deque()
        self.open: dict[str, _Open] = {}

    def take_in(
        self, built: list[Request | BadPrompt], first_index: int
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Let checked requests wait for an engine; of others yield the errors at once."""
        for index, item in enumerate(built, first_index):
            if isinstance(item, BadPrompt):
                yield index, error_output(item, index)
                continue
            seed = item.params.seed
            if seed is None:
                seed = derived_seed(self._seed, int(item.request_id))
            opened = _Open(index, item, seed)
            self.open[item.request_id] = opened
            self._waiting.append(opened)

    def hand_out(self, *, is_complete: bool) -> None:
        """Give waiting requests to the engines with the most room, the emptiest first."""
        batches: dict[int, list[RunItem]] = {}
        alive = self._alive()
        while self._waiting and alive:
            engine = min(alive, key=lambda item: item.num_open_seqs)
            if not engine.has_room:
                break
            opened = self._waiting.popleft()
            request = opened.request
            engine.take(request.request_id, request.params.n)
            batches.setdefault(engine.number, []).append(opened.run_item())
        for number, items in batches.items():
            self._engines[number].send(("run", items))
        if is_complete and not self._waiting:
            self._level(alive)

    def give_up(self) -> None:
        """End what the engines have; their outputs, if they come, are not looked at."""
        for engine in self._alive():
            engine.send(("abort", list(engine.open)))
            engine.forget_all()
            engine.is_recalling = engine.is_draining = False

    def _level(self, alive: list[EngineProcess]) -> None:
        """At the end of the queue: what waits in one engine goes to another that has run dry."""
        if not any(not engine.open for engine in alive):
            return
        for engine in alive:
            num_waiting = engine.load[1]
            if num_waiting and not engine.is_recalling:
                engine.is_recalling = True
                engine.send(("recall", (num_waiting + 1) // 2))

    def drop_waiting(self) -> None:
        """Forget what has not begun to run, here at once and in the engines soon."""
        for opened in self._waiting:
            del self.open[opened.request.request_id]
        self._waiting.clear()
        for engine in self._alive():
            engine.is_draining = True
            engine.send(("recall", None))

    def receive(self, woken: Connection) -> Iterator[tuple[int, RequestOutput]]:
        """Wait for news from the engines or the reader, and deal with it."""
        connections = {engine.connection: engine for engine in self._alive()}
        if not connections:
            raise RuntimeError("All engines have died:\n" + "\n".join(self._faults))
        for ready in wait([*connections, woken], timeout=_POLL_S):
            if ready is woken:
                woken.recv()
                continue
            engine = connections[ready]  # type: ignore[index]  # `wait` gives back what it was given
            try:
                kind, payload = engine.receive()
            except (EOFError, OSError):
                if not engine.is_stopped:  # as by another thread
                    yield from self._bury(engine)
                continue
            if kind == "failed":
                engine.failure = payload.trace
            elif kind == "returned":
                self._take_back(engine, payload)
            else:
                yield from self._finish(engine, payload)

    def _finish(
        self, engine: EngineProcess, outputs: list[RequestOutput]
    ) -> Iterator[tuple[int, RequestOutput]]:
        for sample in engine.samples:
            self._on_sample(sample)
        engine.samples.clear()
        for output in outputs:
            engine.forget(output.request_id)
            opened = self.open.pop(output.request_id, None)
            if opened is not None:
                yield opened.index, output

    def _take_back(self, engine: EngineProcess, request_ids: list[str]) -> None:
        engine.is_recalling = False
        if not request_ids:  # all that waits there has run before: do not ask again at once
            engine.load = (engine.load[0], 0, engine.load[2])
        for request_id in request_ids:
            engine.forget(request_id)
            opened = self.open.get(request_id)
            if opened is None:
                continue
            if engine.is_draining:
                del self.open[request_id]
            else:
                self._waiting.append(opened)
        engine.is_draining = False

    def _bury(self, engine: EngineProcess) -> Iterator[tuple[int, RequestOutput]]:
        """An engine is gone: its requests go to the others, but for those that kill engines."""
        lost = [self.open[request_id] for request_id in engine.open if request_id in self.open]
        engine.forget_all()
        self._faults.append(f"{engine.end()} {len(lost)} open requests went to other engines.")
        logger.error("%s", self._faults[-1])
        if engine.is_draining:
            for opened in lost:  # not known to have begun: left for another run
                del self.open[opened.request.request_id]
            return
        for opened in reversed(lost):
            opened.num_deaths += 1
            if opened.num_deaths < _MAX_DEATHS:
                self._waiting.appendleft(opened)
                continue
            del self.open[opened.request.request_id]
            reason = f"was given up: {opened.num_deaths} engines died while they had it"
            bad = BadPrompt(opened.index, opened.request.prompt, reason)
            yield opened.index, error_output(bad, opened.index)

    def _alive(self) -> list[EngineProcess]:
        return [engine for engine in self._engines if engine.is_alive]
