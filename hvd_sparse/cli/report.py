"""Shows what a run did: density, bandwidth, exchange and step time over its steps, and every decision with its reason.

Reads a metrics log, one JSON object per line with the keys step, density, collective, bandwidth_bytes_per_second,
exchange_seconds, step_seconds, predicted_seconds, reason and changed; each may be null or missing. Writes one PNG file,
or one HTML page that holds its picture and a table of the decisions. Prints the file's path.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_sparse.cli.errors import CommandError, UsageError

EXAMPLES = """\
examples:
  hvd-sparse report run.jsonl                              writes run.html beside the log
  hvd-sparse report run.jsonl --out pictures/run.png       the picture alone
"""

# Of each panel: label, logarithmic, and its curves as key, factor, name.
PANELS = (
    ("density", True, [("density", 1.0, "density")]),
    ("bandwidth, Gbit/s", True, [("bandwidth_bytes_per_second", 8e-9, "measured")]),
    ("exchange, ms", False, [("exchange_seconds", 1e3, "measured"), ("predicted_seconds", 1e3, "predicted")]),
    ("step, ms", False, [("step_seconds", 1e3, "measured")]),
)
NUMBERS = ("step", *(key for _, _, curves in PANELS for key, _, _ in curves))
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 64em; }}
td, th {{ border-bottom: 1px solid #ccc; padding: 0.3em 1em 0.3em 0; text-align: left; vertical-align: top; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<img alt="density, bandwidth, exchange and step time over steps" src="data:image/png;base64,{picture}">
<h2>Decisions</h2>
{decisions}
</body>
</html>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("log", metavar="RUN.jsonl", help="the metrics log of one rank")
    parser.add_argument("--out", metavar="FILE", help="a .html or .png file (default: RUN.html beside the log)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    log = Path(args.log).expanduser()
    out = output_file(args.out, "--out", (".html", ".png")) if args.out else log.with_suffix(".html")
    lines = read_log(log)
    picture = draw(lines)
    write(out, picture if out.suffix == ".png" else page(log.name, lines, picture).encode(), "--out")
    print(out)
    return 0


def read_log(log: Path) -> list[dict[str, Any]]:
    """The log's lines. A number that is missing, null or not finite is NaN; a line without a step has its own number.

    Raises:
        UsageError: there is no such file. CommandError: it has no lines, or one that is not as described above.
    """
    try:
        text = log.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file"
        raise UsageError(f"`RUN.jsonl` must be a metrics log that can be read. Received: {log} ({why}).") from None
    if not text.strip():
        raise CommandError(f"{log} has no lines: give the log of a run that has taken a step.")
    lines = text.removesuffix("\n").split("\n")
    return [_parsed(line, f"{log}, line {number}", number) for number, line in enumerate(lines, 1)]


def _parsed(line: str, place: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        what = error if line.strip() else "the line is empty"
        raise CommandError(f"{place}: each line must be a JSON object; {what}.") from None
    if not isinstance(found, dict):
        raise CommandError(f"{place}: each line must be a JSON object. Received: {line.strip()[:80]}.")
    for key in NUMBERS:
        value = found.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise CommandError(f"{place}: `{key}` must be a number or null. Received: {key}={value!r}.")
        found[key] = float(value) if value is not None and math.isfinite(value) else math.nan
    if math.isnan(found["step"]):
        found["step"] = float(number)
    return found


def draw(lines: Sequence[dict[str, Any]]) -> bytes:
    """The PNG file: a panel for each of `PANELS`, decisions as vertical lines."""
    figure, axes = new_figure(len(PANELS), 1, width=9.0, height=2.0)
    steps = [line["step"] for line in lines]
    for axis, (label, logarithmic, curves) in zip((row[0] for row in axes), PANELS):
        axis.set_ylabel(label)
        axis.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
        known = [curve for curve in curves if any(not math.isnan(line[curve[0]]) for line in lines)]
        for key, factor, name in known:
            axis.plot(steps, [factor * line[key] for line in lines], ".-", markersize=3, linewidth=1, label=name)
        for line in filter(_changed, lines):
            axis.axvline(line["step"], color="0.6", linestyle="--", linewidth=1, zorder=0)
        if not known:
            axis.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axis.transAxes, color="0.5")
        elif logarithmic and all(line[key] > 0 for key, _, _ in known for line in lines if not math.isnan(line[key])):
            axis.set_yscale("log")
            axis.minorticks_off()
            axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(bottom=0)
        if len(known) > 1:
            axis.legend(fontsize="small")
    axes[-1][0].set_xlabel("step (dashed: a decision)")
    return as_png(figure)


def page(name: str, lines: Sequence[dict[str, Any]], picture: bytes) -> str:
    """The HTML page."""
    changes = [line for line in lines if _changed(line)]
    cells = [(f"{line['step']:g}", _what(line), str(line.get("reason") or "")) for line in changes]
    rows = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells]
    table = "\n".join(["<table>", "<tr><th>step</th><th>what</th><th>reason</th></tr>", *rows, "</table>"])
    first, last = lines[0]["step"], lines[-1]["step"]
    return PAGE.format(
        title=html.escape(name),
        summary=f"Steps {first:g} to {last:g}, {len(changes)} decision{'s' * (len(changes) != 1)}.",
        picture=base64.b64encode(picture).decode(),
        decisions=table if changes else "<p>The plan never changed.</p>",
    )


def _changed(line: dict[str, Any]) -> bool:
    return line.get("changed") is True


def _what(line: dict[str, Any]) -> str:
    collective = str(line.get("collective") or "unknown")
    return collective if math.isnan(line["density"]) else f"{collective} at density {line['density']:g}"


# What `hvd-sparse plan` uses as well.


def output_file(value: str, option: str, suffixes: tuple[str, ...]) -> Path:
    """The file that an option names."""
    file = Path(value).expanduser()
    if file.suffix not in suffixes or file.is_dir():
        raise UsageError(f"`{option}` must be a {' or '.join(suffixes)} file. Received: {option}={value}.")
    return file


def write(file: Path, content: bytes, option: str) -> None:
    """Writes a file, and creates the folder that it is in."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        message = f"`{option}` must be in a place that can be written. Received: {file} ({error.strerror})."
        raise UsageError(message) from None


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure that needs no screen, and its axes [row][column] of so many inches.

    Raises:
        CommandError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError("pictures need matplotlib: run `pip install 'hvd-sparse[plot]'`.") from None
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def as_png(figure: Any) -> bytes:
    """The figure as the content of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
