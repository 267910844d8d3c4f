"""The report, the trace and the progress line."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from nanovllm.batch.progress import BatchProgress, Standing, format_standing
from nanovllm.metrics import Metrics, StepSampler
from nanovllm.report import Timeline, TraceWriter, report_html
from nanovllm.report.svg import Series, histogram, line_chart
from nanovllm.report.timeline import MAX_BUCKETS


def samples(num_steps, *, seconds=0.1, engine=0):
    """Steps one after another from time 100, as an engine's counters give them."""
    found = []
    metrics = Metrics()
    sampler = StepSampler(metrics, found.append)
    for _ in range(num_steps):
        metrics.launch_s += seconds
        metrics.num_output_tokens += 10
        metrics.num_decode_rows += 10
        metrics.num_prompt_tokens += 4
        metrics.num_cached_tokens += 1
        sampler(metrics, (10, 5, 0.25))
    return [
        replace(sample, end_s=100 + (i + 1) * seconds, engine=engine)
        for i, sample in enumerate(found)
    ]


def test_buckets_hold_all_that_happened_however_long_it_took():
    timeline = Timeline(100.0)
    for sample in samples(5000, seconds=0.5):
        timeline.add_step(sample)
    assert len(timeline.buckets) <= MAX_BUCKETS
    assert len(timeline.buckets) * timeline.width_s == pytest.approx(2500, rel=0.01)
    total = sum(bucket.num_output_tokens for bucket in timeline.buckets)
    assert total == pytest.approx(50_000)
    middle = timeline.buckets[60]
    assert middle.num_output_tokens / timeline.width_s == pytest.approx(20)
    assert middle.load() == pytest.approx((10, 5, 0.25))


def test_a_long_step_is_spread_over_its_time():
    timeline = Timeline(100.0)
    timeline.add_step(samples(1, seconds=2.0)[0])
    rates = [bucket.num_output_tokens for bucket in timeline.buckets[:4]]
    assert rates == pytest.approx([10 / 4] * 4)


def test_loads_of_engines_add_up():
    timeline = Timeline(100.0)
    for engine in (0, 1):
        for sample in samples(4, engine=engine):
            timeline.add_step(sample)
    assert timeline.buckets[0].load() == pytest.approx((20, 10, 0.25))


def test_the_report_is_one_file_and_escapes_text():
    timeline = Timeline(100.0)
    for sample in samples(50):
        timeline.add_step(sample)
    timeline.add_request(1234, 7)
    evil = "<script>alert('x')</script>&"
    html = report_html(timeline, title=evil, facts={evil: evil})
    assert "<script" not in html and "&lt;script&gt;" in html
    assert not re.search(r"(src|href)\s*=|url\(|@import", html), "nothing is fetched"
    charts = re.findall(r"<svg.*?</svg>", html)
    assert len(charts) == 8
    for chart in charts:
        ElementTree.fromstring(chart)


def test_an_empty_run_has_a_report():
    assert "nothing finished" in report_html(Timeline(0.0), title="t", facts={})


def test_charts_stay_inside_their_frame():
    chart = line_chart([Series("a", [0, 5, 1e7]), Series("b", [1, 1, 1])], 60.0)
    for path in re.findall(r'd="M([^"]*)"', chart):
        for x, y in re.findall(r"([\d.]+) ([\d.]+)", path):
            assert 0 <= float(x) <= 560 and 0 <= float(y) <= 220
    bars = histogram({3: 5, 900: 1}, "tokens")
    assert "<title>0 to 49: 5</title>" in bars and bars.count("<rect") == 19


def test_the_trace_is_what_viewers_read(tmp_path):
    trace = TraceWriter(tmp_path / "t.json", 100.0, max_steps=3)
    for sample in samples(5):
        trace.add_step(sample)
    trace.close()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "decode"]
    assert [event["ts"] for event in steps] == pytest.approx([0, 1e5, 2e5], abs=1)
    assert all(event["dur"] == pytest.approx(1e5) for event in steps)
    assert {event["ph"] for event in events} == {"M", "X", "C"}


def standing(**changes):
    values = dict(
        num_done=50, num_done_now=40, num_failed=2, num_output_tokens=900, total=90, fraction=0.5
    )
    return Standing(**{**values, **changes})


def test_the_progress_line_has_rate_time_left_and_failures():
    line = format_standing(standing(), tokens_per_s=1234.4, elapsed_s=100, with_bar=False)
    assert line == "50 of 90 | 56% | 1,234 tokens/s | 0:01:40 gone | 0:01:40 left | 2 failed"
    unknown = standing(total=None, fraction=None)
    line = format_standing(unknown, tokens_per_s=0, elapsed_s=1, with_bar=True)
    assert line == "50 done | 0 tokens/s | 0:00:01 gone | 2 failed"
    bar = format_standing(standing(total=None), tokens_per_s=0, elapsed_s=1, with_bar=True)
    assert bar.startswith("[############............] 50 done | 50%")


def test_a_terminal_gets_a_bar_and_a_file_lines():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, beginning in ((Terminal(), "\r"), (io.StringIO(), "50 of 90")):
        progress = BatchProgress(standing, stream)
        progress.close()
        progress.close()
        assert stream.getvalue().startswith(beginning) and stream.getvalue().endswith("\n")
