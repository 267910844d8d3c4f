"""A soak: everything at once for minutes, on a cache that is too small, and every answer checked.

    PYTHONPATH=. python tests/gpu/soak.py --minutes 8

Greedy sums come with their known answers in many disguises (n, filters that leave one token,
logprobs, penalties, seeds, stop strings, chats, ids); long sampled texts fill the cache,
so that rows are preempted; requests are aborted at random; whole calls of `generate`, `score` and
their like run in between. Every half minute the engine is emptied, checked and put to
sleep. Needs about 1 GiB of the GPU and may run beside other programs. Exit code 1: something was
wrong or leaked.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, RequestOutput, SamplingParams

MODEL = Path(__file__).parents[1] / "tiny-qwen3"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
OPENINGS = [
    "And it came to pass",
    "Call me Ishmael.",
    "In the beginning",
    "Behold",
    "The LORD said",
]
PERIOD_S = 30.0


def figures() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "device_mib": 0.0,
    }
    if torch.cuda.is_available():
        held["device_mib"] = torch.cuda.memory_allocated() / 2**20
    return held


class Soak:
    """Owns an engine, what is open in it, and the count of what went wrong."""

    def __init__(self, llm: LLM, sums: list[tuple[str, str]], seed: int) -> None:
        self.llm = llm
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.open: dict[str, tuple[str, str | None]] = {}  # id -> (kind, expected text)
        # The model misses a few, alone or as a chat; those say nothing about the engine.
        questions = [question for question, _ in sums]
        chats = [[{"role": "user", "content": question}] for question in questions]
        alone = llm.generate(questions, GREEDY, use_tqdm=False)
        as_chats = llm.chat(chats, GREEDY, use_tqdm=False)
        self.sums = [
            (question, answer)
            for (question, answer), *outputs in zip(sums, alone, as_chats, strict=True)
            if all(output["text"].strip() == answer for output in outputs)
        ]
        assert len(self.sums) >= 0.98 * len(sums), f"only {len(self.sums)} of {len(sums)} right"

    def params(self) -> SamplingParams:
        """Parameters under which only the greedy answer can come out."""
        changes = self.draw.choice(
            [
                {},
                {"n": 3, "temperature": 0.6, "top_k": 1},
                {"temperature": 1.0, "top_k": 1},
                {"temperature": 0.8, "top_p": 1e-6},
                {"temperature": 0.7, "min_p": 1.0},
                {"logprobs": 2, "prompt_logprobs": 1},
                {"repetition_penalty": 1.0001},
                {"seed": self.draw.randrange(1000), "logprobs": 0},
                {"stop": ["\n", "ZZ"]},
                {"temperature": 0.9, "top_k": 1, "n": 2, "presence_penalty": 0.0001},
                {"logit_bias": {5: -1.0}},
            ]
        )
        return GREEDY.clone(**changes)

    def add(self) -> None:
        """Open one more request."""
        kind = self.draw.choices(["sum", "ids", "long", "shared"], [6, 2, 3, 1])[0]
        if kind in ("long", "shared"):
            opening = self.draw.choice(OPENINGS) * (12 if kind == "shared" else 1)
            temperature = self.draw.choice([0.0, 0.8, 1.2])
            params = SamplingParams(
                temperature=temperature,
                top_p=self.draw.choice([1.0, 0.9]),
                max_tokens=self.draw.randrange(50, 400),
                ignore_eos=True,
                n=self.draw.choice([1, 1, 2]) if temperature else 1,
            )
            request_id = self.llm.add_request(opening, params)
            self.open[request_id] = (f"{params.max_tokens}", None)
        else:
            question, answer = self.draw.choice(self.sums)
            prompt: Any = question
            if kind == "ids":
                prompt = self.llm.get_tokenizer()(question)["input_ids"]
            self.open[self.llm.add_request(prompt, self.params())] = (kind, answer)
        self.counts["requests"] += 1

    def check(self, output: RequestOutput, kind: str, expected: str | None) -> None:
        for completion in output.outputs:
            if expected is None:
                is_right = completion.finish_reason == "length"
                is_right &= len(completion.token_ids) == int(kind)
            else:
                is_right = completion.text.strip() == expected
            if not is_right:
                self.wrong(f"{output.prompt!r} {kind}: {completion!r:.300}, not {expected!r}")

    def wrong(self, what: str) -> None:
        self.counts["wrong"] += 1
        self.faults.append(what)

    def step(self) -> None:
        for output in self.llm.step():
            entry = self.open.pop(output.request_id, None)
            if entry is None:
                self.wrong(f"an output of nobody: {output!r:.200}")
            else:
                self.check(output, *entry)
                self.counts["finished"] += 1

    def abort(self) -> None:
        victims = self.draw.sample(
            sorted(self.open), min(len(self.open), self.draw.randrange(1, 4))
        )
        for output in self.llm.abort(victims):
            self.open.pop(output.request_id)
            self.counts["aborts"] += 1
        if any(victim in self.open for victim in victims):
            self.wrong("an abort without an output")

    def call(self) -> None:
        """A whole call while other requests are open."""
        some = self.draw.sample(self.sums, 8)
        questions, answers = zip(*some, strict=True)
        kind = self.draw.choice(["generate", "chat", "score", "stream", "generate_iter", "bad"])
        self.counts[kind] += 1
        if kind == "generate":
            texts = [o["text"] for o in self.llm.generate(questions, self.params(), False)]
        elif kind == "chat":
            chats = [[{"role": "user", "content": question}] for question in questions]
            texts = [o["text"] for o in self.llm.chat(chats, GREEDY, False)]
        elif kind == "stream":
            texts = ["".join(self.llm.stream(question, GREEDY)) for question in questions[:2]]
        elif kind == "generate_iter":
            found = {}
            for index, output in self.llm.generate_iter(list(questions), GREEDY):
                found[index] = output["text"]
                if len(found) == 5:
                    break  # closes it: the others are aborted
            texts = [found.get(index, answer) for index, answer in enumerate(answers)]
        elif kind == "score":
            scores = self.llm.score(list(questions), list(answers), False)
            texts = [a if s.is_greedy else "?" for s, a in zip(scores, answers, strict=True)]
        else:
            try:
                self.llm.generate(["12+34=", ""], GREEDY, False)
                texts = ["not refused"]
            except ValueError:
                texts = []
        for text, answer in zip(texts, answers, strict=False):
            if text.strip() != answer:
                self.wrong(f"{kind}: {text!r}, not {answer!r}")

    def drain(self) -> None:
        """Finish all that is open, and look at what is left."""
        for _ in range(20_000):  # many more than the longest answers take one after another
            if not self.open:
                break
            self.step()
        if self.open or not self.llm.is_finished():
            self.wrong(f"no end: {len(self.open)} open")
            self.llm.abort(list(self.open))
            self.open.clear()
        scheduler = self.llm._engine.scheduler
        scheduler.check_invariants()
        if scheduler.blocks.num_free_blocks != scheduler.blocks.num_blocks:
            self.wrong("KV blocks are lost")

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if len(self.open) < self.draw.choice([10, 60, 150]):
                for _ in range(self.draw.randrange(1, 20)):
                    self.add()
            self.step()
            chance = self.draw.random()
            if chance < 0.05 and self.open:
                self.abort()
            elif chance < 0.055:
                self.call()
            elif chance < 0.0555:
                self.llm.observe_steps(self.draw.choice([None, lambda sample: None]))
        self.drain()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-kvcache-blocks", type=int, default=220)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pairs = json.loads((MODEL / "arithmetic_pairs.json").read_text())["held_out"]
    sums = [(f"{a}{sign}{b}=", str({"+": a + b, "-": a - b}[sign])) for a, sign, b in pairs]
    started = time.monotonic()
    with LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        kvcache_block_size=16,
        num_kvcache_blocks=args.num_kvcache_blocks,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        max_model_len=1024,
        enable_overlap=True,
        tensor_parallel_size=args.tensor_parallel_size,
    ) as llm:
        soak = Soak(llm, sums, args.seed)
        first: dict[str, float] | None = None
        while (left := 60 * args.minutes - (time.monotonic() - started)) > 1:
            soak.run(min(PERIOD_S, left))
            if first is None:  # pools, graphs and caches have their size now
                first = figures()
            level = soak.draw.choice([0, 1, 2])
            if level:
                llm.sleep(level)
                llm.wake_up()
            else:
                llm.reset_prefix_cache()
            soak.counts[f"sleep {level}"] += 1
        last = figures()
        assert first is not None, "longer, please"
        metrics = llm.metrics.as_dict()
    counts = soak.counts
    print(
        f"seconds {time.monotonic() - started:.0f}, "
        f"prefill steps {metrics['num_prefill_steps']}, decode steps {metrics['num_decode_steps']}"
    )
    print(
        f"requests {counts['requests']}, finished {counts['finished']}, aborts {counts['aborts']}, "
        f"preemptions {metrics['num_preemptions']}, wrong {counts['wrong']}"
    )
    print("calls", {name: n for name, n in sorted(counts.items()) if name[0] in "gcsb"})
    print("at start", {name: round(value, 1) for name, value in first.items()})
    print("at end  ", {name: round(value, 1) for name, value in last.items()})
    print(*soak.faults[:10], sep="\n")
    bounds = {"rss_mib": 100, "fds": 0, "threads": 0, "device_mib": 8}
    leaks = [name for name, most in bounds.items() if last[name] - first[name] > most]
    is_good = not counts["wrong"] and not leaks and metrics["num_preemptions"] > 0
    print("SOAK", "PASSED" if is_good else f"FAILED {leaks}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
