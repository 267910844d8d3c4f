"""Charts as SVG text: lines over time, bars of a histogram, shares of a whole. Colours are CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 30, 30
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a name for the legend and a value for each bucket."""

    name: str
    values: Sequence[float]


def line_chart(
    series: Sequence[Series], width_s: float, *, top: float | None = None, unit: str = ""
) -> str:
    """Lines over time; each value stands for a bucket `width_s` long. `top` fixes the y axis."""
    num_values = max((len(item.values) for item in series), default=0)
    highest = max((max(item.values, default=0.0) for item in series), default=0.0)
    ticks = _ticks(0.0, top if top is not None else highest)
    total_s = max(num_values * width_s, 1e-9)
    scale, time_unit = _time_unit(total_s)
    parts = [_grid(ticks, unit), _time_axis(total_s, scale, time_unit)]
    for place, item in enumerate(series, 1):
        points = [
            (_x((i + 0.5) * width_s / total_s), _y(value / ticks[-1]))
            for i, value in enumerate(item.values)
        ]
        if not points:
            continue
        # Out to the edges of the first and last bucket, so that short runs fill the frame too.
        points = [(_x(0), points[0][1]), *points, (_x(1), points[-1][1])]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if place == 1:
            base = f"{_x(1):.1f} {_y(0):.1f} L{_x(0):.1f} {_y(0):.1f}"
            parts.append(f'<path class="area s{place}" d="M{path} L{base} Z"/>')
        parts.append(f'<path class="line s{place}" d="M{path}"/>')
    if len(series) > 1:
        parts.append(_legend([item.name for item in series]))
    return _svg(parts, ", ".join(item.name for item in series))


def histogram(counts: dict[int, int], x_label: str, *, max_bars: int = 32) -> str:
    """Bars of how often each value came, in at most `max_bars` bins of equal and round width."""
    if not counts:
        return _svg([_text(_WIDTH / 2, _HEIGHT / 2, "nothing finished", "middle")], x_label)
    low, high = min(counts), max(counts)
    width = max(1, math.ceil(_round_up((high - low + 1) / max_bars)))
    start = low // width * width
    bins = [0] * ((high - start) // width + 1)
    for value, count in counts.items():
        bins[(value - start) // width] += count
    ticks = _ticks(0.0, float(max(bins)))
    parts = [_grid(ticks, "")]
    step = 1 / len(bins)
    label_every = math.ceil(len(bins) / 8)
    for place, count in enumerate(bins):
        left, right = _x(place * step), _x((place + 1) * step)
        # A single bin must not become a wall.
        bar_width = min(right - left - 1.5, 60.0)
        middle = (left + right) / 2
        height = _y(0) - _y(count / ticks[-1])
        first, last = start + place * width, start + (place + 1) * width - 1
        name = f"{first}" if first == last else f"{first} to {last}"
        parts.append(
            f'<rect class="bar s1" x="{middle - bar_width / 2:.1f}" y="{_y(0) - height:.1f}" '
            f'width="{bar_width:.1f}" height="{height:.1f}">'
            f"<title>{name}: {count:,}</title></rect>"
        )
        if place % label_every == 0:
            parts.append(_text(middle, _HEIGHT - 14, f"{first:,}", "middle"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 2, x_label, "end"))
    return _svg(parts, x_label)


def share_bar(shares: dict[str, float], format_value: Callable[[float], str]) -> str:
    """One bar divided by parts of a whole, with a legend under it."""
    total = sum(shares.values()) or 1.0
    height, left, parts = 44 + 24 * len(shares), 0.0, []
    for place, (name, value) in enumerate(shares.items(), 1):
        width = value / total * (_WIDTH - 2)
        parts.append(
            f'<rect class="bar s{place}" x="{left + 1:.1f}" y="6" width="{max(width - 1, 0):.1f}" '
            f'height="26" rx="2"><title>{escape(name)}</title></rect>'
        )
        x, y = 0, 58 + (place - 1) * 24
        label = f"{escape(name)}: {format_value(value)} ({value / total:.0%})"
        parts.append(
            f'<rect class="bar s{place}" x="{x + 1}" y="{y - 10}" width="11" height="11"/>'
        )
        parts.append(_text(x + 18, y, label, "start"))
        left += width
    return _svg(parts, "time by phase", height)


def _svg(parts: list[str], label: str, height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _grid(ticks: list[float], unit: str) -> str:
    parts = []
    for tick in ticks:
        y = _y(tick / ticks[-1])
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f} H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 8, y + 4, _short(tick) + unit, "end"))
    return "".join(parts)


def _time_axis(total_s: float, scale: float, unit: str) -> str:
    ticks = [tick for tick in _ticks(0.0, total_s / scale) if tick * scale <= total_s * 1.001]
    return "".join(
        _text(
            _x(tick * scale / total_s), _HEIGHT - 10, f"{tick:g} {unit}" if tick else "0", "middle"
        )
        for tick in ticks
    )


def _legend(names: list[str]) -> str:
    parts, x = [], float(_LEFT)
    for place, name in enumerate(names, 1):
        parts.append(_key(place, x, 8))
        parts.append(_text(x + 17, 17.5, escape(name), "start"))
        x += 34 + 7.2 * len(name)
    return "".join(parts)


def _key(place: int, x: float, y: float) -> str:
    return f'<rect class="bar s{place}" x="{x:.0f}" y="{y}" width="11" height="11"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _x(share: float) -> float:
    return _LEFT + share * _PLOT_WIDTH


def _y(share: float) -> float:
    return _TOP + (1 - share) * _PLOT_HEIGHT


def _ticks(low: float, high: float) -> list[float]:
    """From `low` to at least `high` in three to six round steps."""
    span = high - low if high > low else 1.0
    step = _round_up(span / 5)
    return [low + i * step for i in range(math.ceil(span / step - 1e-9) + 1)]


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..., or a tenth, hundredth... of one."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= value * (1 - 1e-9))


def _time_unit(total_s: float) -> tuple[float, str]:
    if total_s < 180:
        return 1.0, "s"
    return (60.0, "min") if total_s < 10800 else (3600.0, "h")


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
