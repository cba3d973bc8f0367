#!/usr/bin/env python3
"""Draw a run as one self-contained SVG: the sampled reward a step as a line, held-out accuracy as points.

    python bench/picture.py runs/quickstart docs/images/quickstart.svg [--held-out rewards/correct]

Reads `metrics.jsonl` and `eval.jsonl` of the run folder. The background is transparent and every colour is of middle
lightness, so the picture reads on white and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 28, 44, 46  # margins around the plot, in pixels
LINE, POINT, TEXT, GRID = "#3b86dd", "#d9742b", "#7a828c", "#8b949e"
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
SMOOTH = 12  # the moving average spans a twelfth of the run
APART = 34  # pixels between the values written at held-out points; a closer one stays without

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high` onto pixels from `start` to `end`, with `ticks` in between."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def series(lines: Sequence[dict[str, Any]], name: str) -> list[Point]:
    """`(step, value)` of every line that has the metric."""
    return [(float(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A centred moving average; at the ends, over the half of the window that is there."""
    reach = max(1, round(len(points) / SMOOTH / 2))
    out = []
    for place, (step, _) in enumerate(points):
        window = [value for _, value in points[max(0, place - reach) : place + reach + 1]]
        out.append((step, sum(window) / len(window)))
    return out


def ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Round numbers that cover `low` to `high`, at most `most` of them."""
    rough = (high - low) / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(number * step, 10) for number in range(first, last + 1))


def reward_axis(values: Sequence[float]) -> Axis:
    """Shares get 0 to 1; other rewards what they span."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low == high:
        low, high = low - 0.5, high + 0.5
    marks = ticks(low, high, 6)
    return Axis(marks[0], marks[-1], HEIGHT - BOTTOM, TOP, marks)


def step_axis(last: float) -> Axis:
    marks = tuple(tick for tick in ticks(0, max(last, 1), 8) if tick <= max(last, 1) and tick == int(tick))
    return Axis(0, max(last, 1), LEFT, WIDTH - RIGHT, marks)


def text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(said)}</text>'


def line(points: Sequence[Point], x: Axis, y: Axis, more: str) -> str:
    path = " ".join(f"{x.at(step):.1f},{y.at(value):.1f}" for step, value in points)
    return f'<polyline fill="none" stroke-linejoin="round" stroke-linecap="round" points="{path}" {more}/>'


def grid(x: Axis, y: Axis) -> list[str]:
    out = []
    for tick in y.ticks:
        at = y.at(tick)
        strong = 0.9 if tick == y.low else 0.28
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="{GRID}" '
            f'stroke-opacity="{strong}"/>'
        )
        out.append(text(LEFT - 8, at + 4, f"{tick:g}", ' text-anchor="end"'))
    out += [text(x.at(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", ' text-anchor="middle"') for tick in x.ticks]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "optimizer step", ' text-anchor="middle"'))
    out.append(text(16, middle, "reward", f' text-anchor="middle" transform="rotate(-90 16 {middle:.1f})"'))
    return out


def held_out_points(points: Sequence[Point], x: Axis, y: Axis) -> list[str]:
    """Dots joined by a thin broken line; the last value is always written, the others where there is room."""
    out = [line(points, x, y, f'stroke="{POINT}" stroke-width="1.2" stroke-dasharray="3 4"')] if points[1:] else []
    written: list[float] = []
    for step, value in sorted(points, key=lambda point: (point != points[-1], point[0])):
        at = x.at(step)
        out.append(f'<circle cx="{at:.1f}" cy="{y.at(value):.1f}" r="4.5" fill="{POINT}"/>')
        if all(abs(at - other) >= APART for other in written):
            written.append(at)
            anchor = "start" if at < LEFT + 20 else "end" if at > WIDTH - RIGHT - 20 else "middle"
            shift = {"start": 7, "end": 4, "middle": 0}[anchor]
            style = f' text-anchor="{anchor}" font-weight="600" fill="{POINT}"'
            out.append(text(at + shift, max(y.at(value) - 10, TOP - 4), f"{value:.3f}", style))
    return out


def legend(held_out: str) -> list[str]:
    out = [
        f'<line x1="{LEFT}" x2="{LEFT + 22}" y1="18" y2="18" stroke="{LINE}" stroke-width="2.5"/>',
        text(LEFT + 30, 22, "sampled reward: each step, and smoothed"),
    ]
    if held_out:
        out.append(f'<circle cx="{LEFT + 300}" cy="18" r="4.5" fill="{POINT}"/>')
        out.append(text(LEFT + 312, 22, held_out))
    return out


def picture(metrics: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]], held_out: str) -> str:
    """The SVG of a run's metrics and evaluations.

    Raises:
        ValueError: no step was logged.
    """
    sampled, points = series(metrics, "reward"), series(evals, held_out)
    if not sampled:
        raise ValueError("metrics.jsonl holds no step with a reward")
    x = step_axis(max(step for step, _ in (*sampled, *points)))
    y = reward_axis([value for _, value in (*sampled, *points)])
    rows = evals[-1].get("rows") if evals else None
    label = f"held-out {held_out}" + (f" ({rows:.0f} rows)" if rows else "")
    end = f"; held out {points[0][1]:.3f} before, {points[-1][1]:.3f} after" if points[1:] else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="{FONT}" font-size="12" fill="{TEXT}">',
        f"<title>{escape(f'Reward over {len(sampled)} steps{end}')}</title>",
        *legend(label if points else ""),
        *grid(x, y),
        line(sampled, x, y, f'stroke="{LINE}" stroke-width="1" stroke-opacity="0.5"'),
        line(smoothed(sampled), x, y, f'stroke="{LINE}" stroke-width="2.5"'),
        *(held_out_points(points, x, y) if points else []),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder with metrics.jsonl")
    parser.add_argument("target", type=Path, help="the SVG to write")
    parser.add_argument("--held-out", default="reward", metavar="NAME", help="metric of eval.jsonl (default reward)")
    args = parser.parse_args(argv)
    try:
        drawn = picture(read(args.run / "metrics.jsonl"), read(args.run / "eval.jsonl"), args.held_out)
    except ValueError as error:
        print(f"{args.run}: {error}", file=sys.stderr)
        return 1
    args.target.parent.mkdir(parents=True, exist_ok=True)
    args.target.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
