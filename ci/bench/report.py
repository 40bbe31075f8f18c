"""From the diaries of launches to numbers, tables, files and pictures."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Samples = dict[str, list[float]]


def pool(launches: Iterable[Sequence[Sequence[dict[str, Any]]]]) -> dict[str, Samples]:
    """Blocks of all launches by contender, in order: those that every rank has finished.

    Returns:
        `seconds`: per step, of the slowest rank. `sent`: bytes per step of the busiest host's network interface.
        `counted`: bytes per step and rank by the optimizer's own account, once for every launch.
        `measuring`: share of a period's time that went into measuring the network and deciding, likewise.
    """
    found: dict[str, Samples] = {key: defaultdict(list) for key in ("seconds", "sent", "measuring", "counted")}
    for diaries in launches:
        blocks: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        once: dict[str, dict[str, list[float]]] = {"counted": defaultdict(list), "measuring": defaultdict(list)}
        for note in (note for diary in diaries for note in diary):
            if note["event"] == "block":
                blocks[note["contender"], note["round"]].append(note)
            elif note["event"] in once:
                once[note["event"]][note["contender"]].append(note["value"])
        for (name, _), notes in blocks.items():
            if len(notes) == len(diaries):
                found["seconds"][name].append(max(note["seconds"] / note["steps"] for note in notes))
                found["sent"][name].append(max(note["sent"] / note["steps"] for note in notes))
        for event, by_name in once.items():
            for name, values in by_name.items():
                found[event][name].append(max(values))
    return {key: dict(samples) for key, samples in found.items()}


def step_rows(names: Iterable[str], samples: dict[str, Samples], failures: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every contender: medians, and what they are compared with. What is not known is None."""
    medians = {key: {name: statistics.median(v) for name, v in one.items()} for key, one in samples.items()}
    seconds = medians["seconds"]
    return [
        {
            "name": name,
            "milliseconds": _times(seconds.get(name), 1e3),
            "efficiency": ratio(seconds.get("computation"), seconds.get(name)),
            "ratio": ratio(seconds.get("horovod"), seconds.get(name)),
            "sent_mb": _times(medians["sent"].get(name), 1e-6),
            "counted_mb": _times(medians["counted"].get(name), 1e-6),
            "measuring": medians["measuring"].get(name),
            "blocks": len(samples["seconds"].get(name, [])),
            "failure": failures.get(name, ""),
        }
        for name in names
    ]


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, if both are known and it is finite."""
    return numerator / denominator if numerator is not None and denominator else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def format_table(rows: Sequence[dict[str, Any]], columns: dict[str, tuple[str, str]]) -> str:
    """Lines of text. A row with a `failure` that lacks the first column's value shows the failure instead.

    Args:
        rows: with `name` and the columns.
        columns: key -> (title, format).
    """
    width = max([len(row["name"]) for row in rows] + [len("contender")]) + 1
    lines = [f"{'contender':<{width}}" + "".join(f"{title:>11}" for title, _ in columns.values())]
    for row in rows:
        cells = [
            "-" if row[key] is None else row[key] if isinstance(row[key], str) else f"{row[key]:{form}}"
            for key, (_, form) in columns.items()
        ]
        failure = row.get("failure", "")
        known = any(row[key] is not None for key in list(columns)[:1])
        text = "".join(f"{cell:>11}" for cell in cells) if known or not failure else "  failed"
        lines.append(f"{row['name']:<{width}}{text}" + (f"  ({_short(failure)})" if failure else ""))
    return "\n".join(lines)


def _short(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(text: str) -> list[str]:
    """The parts of `a,b`, for the command line."""
    return [part.strip() for part in text.split(",") if part.strip()]


def settings_of(args: Any) -> dict[str, Any]:
    """The command line for the JSON file."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


def save(file: Path, settings: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    """Write the JSON file, also while cells are still to come."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"settings": settings, "cells": cells}, indent=1) + "\n")


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A matplotlib figure that needs no screen, and its axes [row][column]."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")


def logarithmic(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2, 5, 10 and so on."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def save_figure(figure: Any, file: Path) -> None:
    """Write the PNG file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
