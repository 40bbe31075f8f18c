"""From the runs of gnn.py to a table and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import report

AVERAGED = ("random", "super", "min-cut")

MRR_TOLERANCE = 0.005  # below min-cut parts
TIME_RATIO = 1.5  # to the MRR that sync ends with
SLOW_RATIO = 1.7  # steps per second with a slow rank
MOST_WAITING = 2.0  # per cent, for averages at least so many seconds apart:
WAITING_INTERVAL = 5.0


def rows_of(runs: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for every name, in order; means over the seeds, medians of times to sync's MRR. None: not known."""
    synchronous = {run["seed"]: run["results"]["curve"] for run in runs if run["name"] == "sync" and run["results"]}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(run["name"] for run in runs):
        mine = [run for run in runs if run["name"] == name]
        found = {run["seed"]: run["results"] for run in mine if run["results"]}
        times, ratios = [], []
        for seed, results in found.items():
            if seed in synchronous:
                goal = synchronous[seed][-1]["MRR"]
                needed = seconds_to(results["curve"], goal)
                times.append(needed)
                ratios.append(report.ratio(seconds_to(synchronous[seed], goal), needed))
        rows.append({
            "name": name,
            **{f"seed{seed}": found[seed]["MRR"] if seed in found else None for seed in seeds},
            "steps_per_second": _mean([one["steps_per_second"] for one in found.values()]),
            "waiting": _mean([100 * one["waiting_share"] for one in found.values()]),
            "megabytes": _mean([1e-6 * one["bytes_per_rank"] for one in found.values()]),
            "to_sync": _median(times),
            "ratio": _median(ratios),
            "failure": "; ".join(f"seed {run['seed']} {run['failure']}" for run in mine if run["failure"]),
        })  # fmt: skip
    return rows


def seconds_to(curve: Sequence[dict[str, float]], goal: float) -> float | None:
    """Seconds of training until the first model that is as good as the goal, None if there is none."""
    return next((point["seconds"] for point in curve if point["MRR"] >= goal), None)


def judge(rows: Sequence[dict[str, Any]], seeds: Sequence[int], every_seconds: float) -> list[str]:
    """A line for each bar that the runs can tell about, and one for what is only reported."""
    by_name = {row["name"]: row for row in rows}
    mrr = {name: _mean([row[f"seed{seed}"] for seed in seeds]) for name, row in by_name.items()}
    lines = []

    def verdict(text: str, holds: bool) -> None:
        lines.append(f"{text}: {'held' if holds else 'NOT HELD'}")

    for name in ("random", "super"):
        if mrr.get(name) is not None and mrr.get("min-cut") is not None:
            gap = mrr[name] - mrr["min-cut"]
            verdict(f"{name}: MRR {gap:+.4f} from min-cut; bar -{MRR_TOLERANCE}", gap >= -MRR_TOLERANCE)
    for name in ("random", "super"):
        if name in by_name and mrr.get("sync") is not None:
            ratio = by_name[name]["ratio"]
            text = "sync's MRR not reached" if ratio is None else f"{ratio:.2f} times faster to sync's MRR"
            verdict(f"{name}: {text}; bar {TIME_RATIO}", ratio is not None and ratio >= TIME_RATIO)
    slow, slow_sync = (by_name.get(f"{name}, a slow rank", {}).get("steps_per_second") for name in ("super", "sync"))
    if slow and slow_sync:
        ratio = slow / slow_sync
        verdict(f"a slow rank: {ratio:.2f} times the steps per second of sync; bar {SLOW_RATIO}", ratio >= SLOW_RATIO)
    for name in AVERAGED:
        if by_name.get(name, {}).get("waiting") is not None and every_seconds >= WAITING_INTERVAL:
            waiting = by_name[name]["waiting"]
            verdict(
                f"{name}: averaging takes {waiting:.2f} % of the time; bar {MOST_WAITING} %", waiting < MOST_WAITING
            )
    missing = mrr.get("super, a part missing")
    if missing is not None and mrr.get("super") is not None:
        lines.append(f"a part missing: MRR {missing - mrr['super']:+.4f}")
    return lines


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _median(values: Sequence[float | None]) -> float | None:
    """None if one of them is: a goal that was missed once has no median time."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
