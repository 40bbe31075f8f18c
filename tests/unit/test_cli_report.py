"""The command `hvd-sparse report`: from a metrics log to a page or a picture."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_sparse.cli import main
from hvd_sparse.cli.report import read_log

PNG = b"\x89PNG\r\n\x1a\n"


def line(step: int, **more: Any) -> dict[str, Any]:
    slow = step >= 20
    return {
        "step": step,
        "density": 0.004 if slow else 0.033,
        "collective": "owner_reduce",
        "bandwidth_bytes_per_second": 1.25e8 if slow else 1.25e9,
        "exchange_seconds": 0.02,
        "step_seconds": 0.12,
        "predicted_seconds": 0.019,
        "reason": f"reason of step {step}",
        "changed": step == 20,
        **more,
    }


def written(folder: Path, lines: list[Any], name: str = "run.jsonl") -> Path:
    log = folder / name
    log.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return log


def picture_in(page: str) -> bytes:
    (found,) = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', page)
    return base64.b64decode(found)


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(PNG)
    return struct.unpack(">II", png[16:24])


def rows_of(page: str) -> list[list[str]]:
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_a_page_beside_the_log(tmp_path, capsys):
    log = written(tmp_path, [line(step) for step in range(40)])
    assert main(["report", str(log)]) == 0
    out = tmp_path / "run.html"
    assert capsys.readouterr().out == f"{out}\n"
    page = out.read_text()
    assert size_of(picture_in(page))[0] > 500
    assert "Steps 0 to 39, 1 decision." in page
    assert rows_of(page) == [[], ["20", "owner_reduce at density 0.004", "reason of step 20"]]
    assert page.count("<tr>") == page.count("</tr>")
    assert not re.search(r'(src|href)="(?!data:)', page), "self-contained"


def test_a_picture_in_a_new_folder(tmp_path, capsys):
    log = written(tmp_path, [line(step) for step in range(40)])
    out = tmp_path / "new" / "run.png"
    assert main(["report", str(log), "--out", str(out)]) == 0
    assert size_of(out.read_bytes())[1] > 500
    assert capsys.readouterr().out == f"{out}\n"


def test_decisions_and_values_are_in_the_picture(tmp_path):
    """Pictures of logs that differ in one thing differ."""
    logs = {
        "plain": [line(step, changed=False) for step in range(30)],
        "decision": [line(step, changed=step == 10) for step in range(30)],
        "density": [line(step, changed=False, density=0.1) for step in range(30)],
        "step": [line(step, changed=False, step_seconds=0.1 * step) for step in range(30)],
        "prediction": [line(step, changed=False, predicted_seconds=None) for step in range(30)],
    }
    found = set()
    for name, lines in logs.items():
        out = tmp_path / f"{name}.png"
        assert main(["report", str(written(tmp_path, lines, f"{name}.jsonl")), "--out", str(out)]) == 0
        found.add(out.read_bytes())
    assert len(found) == len(logs)


@pytest.mark.parametrize(
    "lines",
    [
        [{}],
        [{"step": 3}],
        [dict.fromkeys(line(0))],
        [{"step": 1, "changed": True}, {"changed": True, "collective": "dense", "density": 1.0}],
        [line(0, density=0, bandwidth_bytes_per_second=float("nan"), step_seconds=float("inf"))],
    ],
)
def test_what_is_missing_is_no_error(tmp_path, lines):
    assert main(["report", str(written(tmp_path, lines))]) == 0
    page = (tmp_path / "run.html").read_text()
    assert size_of(picture_in(page))
    assert ("The plan never changed." in page) == (not any(one.get("changed") for one in lines))


def test_lines_without_a_step_are_numbered(tmp_path):
    assert [one["step"] for one in read_log(written(tmp_path, [{}, {"step": None}, {"step": 7}]))] == [1, 2, 7]


def test_reasons_are_text_not_html(tmp_path):
    lines = [line(0, reason="<script>alert(1)</script> & more", changed=True, collective="a<b")]
    assert main(["report", str(written(tmp_path, lines, "a&b.jsonl"))]) == 0
    page = (tmp_path / "a&b.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "<h1>a&amp;b.jsonl</h1>" in page
    assert "a&lt;b at density" in page


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(0), '{"step": 1,'], "run.jsonl, line 2: each line must be a JSON object; "),
        ([line(0), "", line(2)], "run.jsonl, line 2: each line must be a JSON object; the line is empty."),
        ([line(0), line(1), ""], "run.jsonl, line 3: each line must be a JSON object; the line is empty."),
        (["[1, 2]"], "run.jsonl, line 1: each line must be a JSON object. Received: [1, 2]."),
        ([line(0), line(1, density="much")], "run.jsonl, line 2: `density` must be a number or null. Received: "),
        ([line(0, step_seconds=True)], "run.jsonl, line 1: `step_seconds` must be a number or null."),
        ([], "run.jsonl has no lines"),
        (["", ""], "run.jsonl has no lines"),
    ],
)
def test_broken_logs_exit_with_1(tmp_path, capsys, lines, message):
    assert main(["report", str(written(tmp_path, lines))]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hvd-sparse report: error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["{folder}/none.jsonl"],
            "`RUN.jsonl` must be a metrics log that can be read. Received: {folder}/none.jsonl (No",
        ),
        (["{folder}"], "`RUN.jsonl` must be a metrics log that can be read. Received: {folder} (Is a directory)."),
        (["{folder}/binary"], "(it is not a text file)"),
        (
            ["{log}", "--out", "{folder}/run.pdf"],
            "`--out` must be a .html or .png file. Received: --out={folder}/run.pdf.",
        ),
        (
            ["{log}", "--out", "/dev/null/run.png"],
            "`--out` must be in a place that can be written. Received: /dev/null/",
        ),
        ([], "the following arguments are required: RUN.jsonl. See `hvd-sparse report --help`."),
    ],
)
def test_wrong_arguments_exit_with_2(tmp_path, capsys, words, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    names = {"folder": tmp_path, "log": written(tmp_path, [line(0)])}
    assert main(["report", *(word.format(**names) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message.format(**names) in error
    assert len(error.splitlines()) == 1


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(written(tmp_path, [line(0)]))]) == 1
    assert "pip install 'hvd-sparse[plot]'" in capsys.readouterr().err


def test_help(capsys):
    assert main(["report", "--help"]) == 0
    assert "hvd-sparse report run.jsonl" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "report " in capsys.readouterr().out
