"""Random workloads: an engine's settings, and requests asked for in every way at once.

A workload is all that follows from its number, so that a failure can be run again alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from differential.answers import Alone

from nanovllm import LLM, SamplingParams
from nanovllm.engine.executor import LocalExecutor
from nanovllm.frontend.request_builder import BadPrompt, derived_seed
from nanovllm.outputs import RequestOutput

VOCAB, TEXT_VOCAB = 517, 320  # of the tiny model and of its tokenizer
WORDS = ["the ", "quick", " brown", "hello ", "wor", "ld, ", "one ", "🙂", "漢字", "\n", "END"]


class Boom(Exception):
    pass


@dataclass
class Ask:
    """One request: what the engine is asked, and what it is asked alone."""

    prompt: Any
    params: SamplingParams
    alone: SamplingParams  # limits cut to the engine's; the seed that the engine derives


def next_up(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the last token."""
    logits[(output_ids[-1] + 1 if output_ids else 7) % len(logits)] += 9.0
    return logits


class Workload:
    """Runs one on a fresh engine; `run` raises AssertionError where an answer is not right."""

    def __init__(self, number: int, model_dir: Any, alone: Alone) -> None:
        self.rng = random.Random(number)
        self.alone = alone
        self.num_requests = self.num_tokens = self.num_aborts = self.num_faults = 0
        self.num_numbers = 0  # that the engine has given out, of which unset seeds are made
        rng = self.rng
        block_size = rng.choice([16, 16, 16, 32, 48, 64, 128, 256])
        self.max_len = rng.choice([rng.randint(8, 40), rng.randint(20, 90), 130])
        most = -(-self.max_len // block_size)
        num_blocks = rng.choice([most, most + 1, most + rng.randint(0, 6), 8 * most + 8])
        if rng.random() < 0.2:  # sequences outgrow the cache
            num_blocks = max(1, most - rng.randint(0, most))
        self.num_cache_tokens = num_blocks * block_size
        self.options = {
            "kvcache_block_size": block_size,
            "num_kvcache_blocks": num_blocks,
            "max_num_seqs": rng.choice([1, 2, 3, 5, 8, 16]),
            "max_num_batched_tokens": rng.choice([1, 5, 16, 17, 33, 64, 100, 16384, 16384]),
            "max_model_len": self.max_len,
            "enable_overlap": rng.random() < 0.6,
            "enable_prefix_caching": rng.random() < 0.75,
            "enable_request_reordering": rng.random() < 0.6,
            "seed": rng.choice([0, 7]),
        }
        self.stems = [self._ids(200) for _ in range(2)]
        self.turns: list[list[int]] = []  # prompts with their answers, which later prompts go on
        self.model_dir = model_dir

    def run(self) -> None:
        options = {"device": "cpu", "dtype": "float32", **self.options}
        with LLM(self.model_dir, **options) as llm:
            self.llm = llm
            scheduler = llm._engine.scheduler
            if self.rng.random() < 0.4:  # taught that answers are short: preemption
                for _ in range(16):
                    scheduler._predictor.observe(1)
            llm.observe_steps(lambda _: llm._engine.scheduler.check_invariants())
            ways = [self._generate, self._generate, self._iterate, self._step, self._stream]
            for _ in range(self.rng.randint(1, 2)):
                self.rng.choice([*ways, self._fault])()
                self._check_idle()
                self._between()

    # ---- ways to ask

    def _generate(self) -> None:
        asks = self._asks(self.rng.randint(1, 8))
        prompts, params = [a.prompt for a in asks], [a.params for a in asks]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for ask, output in zip(asks, outputs, strict=True):
            self._check(ask, output)

    def _iterate(self) -> None:
        asks = self._asks(self.rng.randint(1, 8))
        num_wanted = self.rng.choice([len(asks), self.rng.randint(0, len(asks))])
        window = self.rng.choice([None, 1, 3, 8])
        results = self.llm.generate_iter(
            (a.prompt for a in asks), [a.params for a in asks], window=window
        )
        found = {}
        while len(found) < num_wanted:
            index, output = next(results)
            assert index not in found
            found[index] = output
        if num_wanted == len(asks):
            assert list(results) == []
        results.close()
        self.num_aborts += num_wanted < len(asks)
        self.num_numbers = None  # how far it had read ahead depends on time
        for index, output in found.items():
            self._check(asks[index], output)

    def _step(self) -> None:
        asks = self._asks(self.rng.randint(1, 8))
        waiting, running = list(enumerate(asks)), {}
        outputs: dict[str, RequestOutput] = {}
        owner: dict[str, Ask] = {}
        for _ in range(20_000):
            while waiting and self.rng.random() < 0.5:
                index, ask = waiting.pop(0)
                name = None if ask.params.seed is None else f"mine-{index}"
                request_id = self.llm.add_request(ask.prompt, ask.params, name)
                owner[request_id] = running[request_id] = ask
            if running and self.rng.random() < 0.04:
                victim = self.rng.choice(list(running))
                aborted = self.llm.abort(victim)
                self.num_aborts += 1
                for output in aborted:
                    outputs[output.request_id] = output
                    running.pop(output.request_id)
            for output in self.llm.step():
                assert output.request_id not in outputs, "an output comes once"
                outputs[output.request_id] = output
                running.pop(output.request_id)
            if not waiting and not running:
                break
        assert not running and not waiting, "no end"
        for request_id, ask in owner.items():
            self._check(ask, outputs[request_id])

    def _stream(self) -> None:
        asks = [a for a in self._asks(4) if a.params.n == 1 and a.params.detokenize]
        others = [a for a in self._asks(2) if a.params.seed is not None]
        for ask in others:
            self.llm.add_request(ask.prompt, ask.params)
            self._count(1)
        pieces: list[list[str]] = []
        streams = []
        for ask in asks:
            if ask.params.seed is None:
                ask = self._reseeded(ask)
            streams.append((ask, self.llm.stream(ask.prompt, ask.params)))
            pieces.append([])
        live = list(range(len(streams)))
        while live:
            place = self.rng.choice(live)
            piece = next(streams[place][1], None)
            if piece is not None:
                assert piece
                pieces[place].append(piece)
            if piece is None or self.rng.random() < 0.03:
                live.remove(place)
                streams[place][1].close()
                ask, whole = streams[place][0], "".join(pieces[place])
                right = self.alone.answer(ask.prompt, ask.alone).outputs[0].text
                if piece is None:
                    self._check_text(ask, whole, right)
                elif not right.startswith(whole):
                    self._check_text(ask, whole, right[: len(whole)])
                self.num_aborts += piece is not None
        self.num_requests += len(asks)
        outputs = []
        while not self.llm.is_finished():
            outputs += self.llm.step()
        by_number = sorted(outputs, key=lambda output: int(output.request_id))
        for ask, output in zip(others, by_number, strict=True):
            self._check(ask, output)
        self.num_numbers = None

    def _fault(self) -> None:
        """A step fails; the call raises, and those before and after it are right."""
        asks = self._asks(self.rng.randint(1, 6))
        when, after = self.rng.randint(1, 12), self.rng.random() < 0.5
        executor = self.llm._engine._executor
        assert isinstance(executor, LocalExecutor)
        real: Callable[..., Any] = executor.execute
        calls = 0

        def failing(output: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == when and not after:
                raise Boom
            future = real(output)
            if calls == when:
                raise Boom
            return future

        executor.execute = failing  # type: ignore[method-assign]
        try:
            outputs = self.llm.generate([a.prompt for a in asks], [a.params for a in asks], False)
        except Boom:
            self.num_faults += 1
        else:
            for ask, output in zip(asks, outputs, strict=True):
                self._check(ask, output)
        finally:
            executor.execute = real  # type: ignore[method-assign]
        self._check_idle()
        self._generate()

    def _between(self) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            self.llm.reset_prefix_cache()
        elif chance < 0.2:
            self.llm.sleep(self.rng.choice([1, 2]))
            self.llm.wake_up()

    # ---- checks

    def _check(self, ask: Ask, output: RequestOutput) -> None:
        self.num_requests += 1
        self.num_tokens += sum(len(out.token_ids) for out in output.outputs)
        self.turns += [output.prompt_token_ids + out.token_ids for out in output.outputs]
        try:
            self.alone.check(output, ask.prompt, ask.alone)
        except AssertionError as error:
            raise AssertionError(f"{ask}, {self.options}: {error}") from error

    def _check_text(self, ask: Ask, text: str, right: str) -> None:
        if text != right:  # as a near tie may make it
            (output,) = self.llm.generate([ask.prompt], ask.params, use_tqdm=False)
            assert output["text"].startswith(text), f"{ask}, {self.options}: {text!r}, {right!r}"
            self._check(ask, output)

    def _check_idle(self) -> None:
        assert self.llm.is_finished() and self.llm.step() == []
        scheduler = self.llm._engine.scheduler
        scheduler.check_invariants()
        assert not scheduler.has_unfinished()
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
        assert self.llm._engine.processor.requests == {}

    # ---- what is asked

    def _asks(self, count: int) -> list[Ask]:
        prompts = [self._prompt() for _ in range(count)]
        if self.rng.random() < 0.3:
            prompts += prompts[:1]
        return [self._ask(prompt) for prompt in prompts]

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def _prompt(self) -> Any:
        rng = self.rng
        longest = min(self.max_len - 1, self.num_cache_tokens)
        if rng.random() < 0.12:
            text = "".join(rng.choices(WORDS, k=rng.randint(1, 6)))
            if len(self.alone.llm.get_tokenizer()(text)["input_ids"]) <= longest:
                return text
        if self.turns and rng.random() < 0.3:
            turn = rng.choice(self.turns)
            return (turn + self._ids(rng.choice([0, 1, 1, 5])))[:longest]
        block_size = self.options["kvcache_block_size"]
        length = rng.choice([rng.randint(1, longest), rng.randint(1, min(24, longest)), longest])
        if rng.random() < 0.4:
            length = block_size * rng.randint(1, 4) + rng.randint(-1, 1)
        length = min(max(length, 1), longest)
        own = min(length, rng.choice([0, 1, 2, 9, 200]))
        return rng.choice(self.stems)[: length - own] + self._ids(own)

    def _ask(self, prompt: Any) -> Ask:
        params = self._params()
        if isinstance(self.alone.llm._engine.builder.build([prompt], [params])[0], BadPrompt):
            params = SamplingParams(temperature=0)  # its rules barred every token
        seed = params.seed
        if seed is None:
            if self.num_numbers is None:  # not known any more
                params = params.clone(seed=(seed := self.rng.randrange(2**64) - 2**63))
            else:
                seed = derived_seed(self.options["seed"], self.num_numbers)
        self._count(1)
        ask = Ask(prompt, params, self._alone_params(prompt, params.clone(seed=seed)))
        if self.rng.random() < 0.2 and params.detokenize:
            ask = self._with_stop(ask)
        return ask

    def _with_stop(self, ask: Ask) -> Ask:
        """Stop at something that the text has, or nearly has."""
        text = self.alone.answer(ask.prompt, ask.alone).outputs[0].text
        start = self.rng.randrange(len(text) + 1)
        found = text[start : start + self.rng.randint(1, 4)]
        stops = [s for s in (found, found + "x", self.rng.choice(WORDS)) if s]
        changes = {
            "stop": self.rng.sample(stops, self.rng.randint(1, len(stops))),
            "include_stop_str_in_output": self.rng.random() < 0.3,
        }
        return Ask(ask.prompt, ask.params.clone(**changes), ask.alone.clone(**changes))

    def _reseeded(self, ask: Ask) -> Ask:
        seed = self.rng.randrange(1000)
        return Ask(ask.prompt, ask.params.clone(seed=seed), ask.alone.clone(seed=seed))

    def _alone_params(self, prompt: Any, params: SamplingParams) -> SamplingParams:
        if isinstance(prompt, str):
            prompt = self.alone.llm.get_tokenizer()(prompt)["input_ids"]
        room = min(self.max_len, self.num_cache_tokens + 1) - len(prompt)
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        return params.clone(max_tokens=most, min_tokens=min(params.min_tokens, most))

    def _count(self, num: int) -> None:
        if self.num_numbers is not None:
            self.num_numbers += num

    def _params(self) -> SamplingParams:
        rng = self.rng

        def sometimes(share: float, value: Callable[[], Any], otherwise: Any = None) -> Any:
            return value() if rng.random() < share else otherwise

        max_tokens = rng.choice([1, 2, 5, 9, 20, 40 if rng.random() < 0.5 else None])
        options = {
            "temperature": (
                temperature := sometimes(0.6, lambda: rng.choice([1e-4, 0.3, 1, 2]), 0)
            ),
            "n": sometimes(0.2 if temperature else 0, lambda: rng.randint(2, 4), 1),
            "top_p": sometimes(0.2, lambda: rng.uniform(0.05, 1), 1.0),
            "top_k": sometimes(0.2, lambda: rng.choice([1, 2, 5, 40, 1000]), 0),
            "min_p": sometimes(0.15, lambda: rng.uniform(0, 0.5), 0.0),
            "presence_penalty": sometimes(0.12, lambda: rng.uniform(-2, 2), 0.0),
            "frequency_penalty": sometimes(0.12, lambda: rng.uniform(-2, 2), 0.0),
            "repetition_penalty": sometimes(0.12, lambda: rng.uniform(0.5, 2), 1.0),
            "seed": sometimes(0.8, lambda: rng.choice([0, 42, -5, 2**63, rng.randrange(10**9)])),
            "stop_token_ids": sometimes(0.15, lambda: rng.sample(range(VOCAB), 25)),
            "ignore_eos": rng.random() < 0.4,
            "max_tokens": max_tokens,
            "min_tokens": sometimes(0.15, lambda: rng.randint(0, max_tokens or 9), 0),
            "logprobs": sometimes(0.15, lambda: rng.choice([0, 1, 5, -1])),
            "prompt_logprobs": sometimes(0.1, lambda: rng.choice([0, 1, 3, -1])),
            "detokenize": rng.random() < 0.95,
            "skip_special_tokens": rng.random() < 0.8,
            "bad_words": sometimes(0.08, lambda: rng.sample(WORDS, 2)),
            "logit_bias": sometimes(
                0.15, lambda: {2: rng.uniform(0, 15), **{i: rng.gauss(0, 5) for i in self._ids(4)}}
            ),
            "allowed_token_ids": sometimes(0.08, lambda: self._ids(rng.choice([4, 60]))),
            "logits_processors": sometimes(0.04, lambda: [next_up]),
        }
        return SamplingParams(**options)
