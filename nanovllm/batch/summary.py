"""What a job has come to: for people, for `--metrics`, and for the exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OK, SOME_FAILED, BROKEN, INTERRUPTED = 0, 1, 2, 130  # exit codes


@dataclass(slots=True)
class BatchSummary:
    """Counts of one run of a job; written by `run_batch` while it goes on."""

    num_ok: int = 0
    num_failed: int = 0
    num_done_before: int = 0  # lines that an earlier run of the job answered
    num_failed_before: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    load_s: float = 0.0
    run_s: float = 0.0
    is_interrupted: bool = False
    input_failure: str | None = None
    file_failures: list[str] = field(default_factory=list)  # of --metrics, --report, --trace
    notes: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)  # the engine's counters

    @property
    def exit_code(self) -> int:
        """0: all have a result; 1: some an error; 2: broken input, unwritten file; 130: stopped."""
        if self.input_failure is not None:
            return BROKEN
        if self.is_interrupted:
            return INTERRUPTED
        if self.file_failures:
            return BROKEN
        return SOME_FAILED if self.num_failed or self.num_failed_before else OK

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / max(self.run_s, 1e-9)

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.num_prompt_tokens / max(self.run_s, 1e-9)

    def facts(self) -> dict[str, str]:
        """Name and value of what a person wants to know, in order."""
        facts = {
            "requests ok": f"{self.num_ok:,}",
            "requests failed": f"{self.num_failed:,}",
            "tokens in": f"{self.num_prompt_tokens:,}",
            "tokens out": f"{self.num_output_tokens:,}",
            "tokens in per second": f"{self.prompt_tokens_per_s:,.0f}",
            "tokens out per second": f"{self.output_tokens_per_s:,.0f}",
            "prefix cache hits": f"{self.cache_hit_rate:.1%}",
            "preemptions": f"{self.engine.get('num_preemptions', 0):,}",
            "time to run": f"{self.run_s:,.1f} s",
            "time to load": f"{self.load_s:,.1f} s",
        }
        if self.num_done_before:
            facts["done in earlier runs"] = (
                f"{self.num_done_before:,} ({self.num_failed_before:,} failed)"
            )
        for reason, count in sorted(self.finish_reasons.items()):
            facts[f"ended by {reason}"] = f"{count:,}"
        return facts

    def text(self) -> str:
        """The end-of-run summary."""
        facts = self.facts()
        width = max(map(len, facts))
        lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
        phases = ", ".join(
            f"{name} {self.engine.get(f'{name}_s', 0.0):,.1f} s"
            for name in ("schedule", "launch", "wait", "update")
        )
        lines.append(f"{'time by phase':<{width}}  {phases}")
        lines += self.notes + self.file_failures
        if self.num_failed or self.num_failed_before:
            lines.append(
                "Lines that failed say why under 'error' in the output; --retry-failed runs them "
                "again, mended or not."
            )
        if self.is_interrupted:
            lines.append("Stopped early: the same command goes on from here.")
        if self.input_failure is not None:
            lines.append(f"Not complete: {self.input_failure}.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for `--metrics`."""
        names = [n for n in self.__dataclass_fields__ if n not in ("finish_reasons", "engine")]
        return {
            **{name: getattr(self, name) for name in names},
            "finish_reasons": dict(self.finish_reasons),
            "output_tokens_per_s": self.output_tokens_per_s,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "cache_hit_rate": self.cache_hit_rate,
            "exit_code": self.exit_code,
            "engine": self.engine,
        }
