"""A run as one HTML file: what was done, how fast, how full the engine was. Needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from nanovllm.report.svg import Series, histogram, line_chart, share_bar
from nanovllm.report.timeline import Timeline
from nanovllm.report.trace import TraceWriter

__all__ = ["Timeline", "TraceWriter", "report_html", "write_report"]

_PHASE_NAMES = {
    "schedule": "putting steps together",
    "launch": "launching them, on a CPU running them",
    "wait": "waiting for the device",
    "update": "taking tokens in",
}


def write_report(path: Path, timeline: Timeline, *, title: str, facts: Mapping[str, str]) -> None:
    """Write the report of a run to `path`."""
    path.write_text(report_html(timeline, title=title, facts=facts), encoding="utf-8")


def report_html(timeline: Timeline, *, title: str, facts: Mapping[str, str]) -> str:
    """The report as text. `facts` become the table at the top, in order."""
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    cards = "".join(
        f"<section><h2>{escape(name)}</h2>{note and f'<p>{escape(note)}</p>'}{chart}</section>"
        for name, note, chart in _charts(timeline)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1><dl>{rows}</dl><main>{cards}</main></body></html>\n"
    )


def _charts(timeline: Timeline) -> list[tuple[str, str, str]]:
    """Name, note and picture of each chart."""
    width, buckets = timeline.width_s, timeline.buckets
    loads = [bucket.load() for bucket in buckets]

    def rates(field: str) -> list[float]:
        return [getattr(bucket, field) / width for bucket in buckets]

    hits = _hit_rates(timeline)
    num_engines = len(timeline.engines)
    engines = f", {num_engines} engines together" if num_engines > 1 else ""
    return [
        (
            "Output tokens per second",
            f"new tokens{engines}",
            line_chart([Series("output", rates("num_output_tokens"))], width),
        ),
        (
            "Prompt tokens per second",
            "computed in prefill steps; prefix hits are not among them",
            line_chart([Series("prompt", rates("num_prefill_tokens"))], width),
        ),
        (
            "Sequences",
            f"mean over time{engines}",
            line_chart(
                [
                    Series("running", [load[0] for load in loads]),
                    Series("waiting", [load[1] for load in loads]),
                ],
                width,
            ),
        ),
        (
            "KV cache in use",
            f"share of blocks; {timeline.num_preemptions:,} preemptions",
            line_chart([Series("used", [100 * x[2] for x in loads])], width, top=100.0, unit="%"),
        ),
        (
            "Prefix cache hits",
            "share of the prompt tokens of requests that finished",
            line_chart([Series("hits", hits)], width, top=100.0, unit="%"),
        ),
        (
            "Time by phase",
            f"of {timeline.num_steps:,} steps, as the host sees them{engines}",
            share_bar(
                {_PHASE_NAMES[name]: s for name, s in timeline.phases.items()},
                lambda seconds: f"{seconds:,.1f} s",
            ),
        ),
        ("Prompt lengths", "requests by tokens", histogram(timeline.prompt_lengths, "tokens")),
        ("Output lengths", "requests by tokens", histogram(timeline.output_lengths, "tokens")),
    ]


def _hit_rates(timeline: Timeline) -> list[float]:
    """Percent for each bucket; where no request finished, the last value stays."""
    rates, last = [], 0.0
    for bucket in timeline.buckets:
        if bucket.num_prompt_tokens > 0:
            last = 100 * bucket.num_cached_tokens / bucket.num_prompt_tokens
        rates.append(last)
    return rates


_STYLE = """
:root { --text: #1d2129; --soft: #646b78; --back: #f5f6f8; --card: #fff; --rule: #e4e7ec;
  --s1: #2563c9; --s2: #d9730d; --s3: #7a8494; --s4: #2f9e6b; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaee; --soft: #9aa3b2; --back: #14161a;
  --card: #1d2026; --rule: #30353e; --s1: #6ea3ff; --s2: #f0a050; --s3: #8c97a8; --s4: #5cc796; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px; max-width: 1240px; color: var(--text);
  background: var(--back); font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 18px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; }
section p { margin: 0; color: var(--soft); font-size: 13px; min-height: 19px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 1px;
  margin: 0 0 18px; background: var(--rule); border: 1px solid var(--rule); border-radius: 8px;
  overflow: hidden; }
dl div { background: var(--card); padding: 10px 14px; }
dt { color: var(--soft); font-size: 12.5px; }
dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr));
  gap: 16px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 14px 16px 8px; }
svg { display: block; width: 100%; height: auto; margin-top: 4px; }
text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.area { opacity: 0.13; stroke: none; }
.line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); }
.area.s1, .bar.s1 { fill: var(--s1); } .bar.s2 { fill: var(--s2); }
.bar.s3 { fill: var(--s3); } .bar.s4 { fill: var(--s4); }
"""
