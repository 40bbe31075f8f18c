"""Parts of `hvd-sparse build-horovod`: the sources, what is missing, the log, the child process."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_sparse.cli.errors import CommandError, UsageError
from hvd_sparse.cli.horovod_wheel import compilation, needs, source
from hvd_sparse.cli.horovod_wheel.options import Options
from hvd_sparse.cli.horovod_wheel.process import run_logged

BOTH = {"torch": ("torch", "2.13.0+cpu"), "tensorflow": ("tensorflow-cpu", "2.21.0")}


def write_sdist(path: Path, line: str = source.DROPPED_LINE, top: str = "horovod-0.28.1") -> Path:
    text = f'list(APPEND TF_SOURCES "mpi_ops.cc")\n{line}add_library(tensorflow)\n'.encode()
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo(top)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(folder)
        member = tarfile.TarInfo(f"{top}/{source.DROPPED_FROM}")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return path


# The sources


def test_edit_drops_the_one_line(tmp_path):
    sources = source.unpack(write_sdist(tmp_path / "a.tar.gz"), tmp_path)
    source.edit(sources)
    assert (
        sources / source.DROPPED_FROM
    ).read_text() == 'list(APPEND TF_SOURCES "mpi_ops.cc")\nadd_library(tensorflow)\n'


@pytest.mark.parametrize("line", ["", source.DROPPED_LINE * 2])
def test_edit_refuses_other_sources(tmp_path, line):
    sources = source.unpack(write_sdist(tmp_path / "a.tar.gz", line), tmp_path)
    with pytest.raises(CommandError, match=rf"CMakeLists.txt and found it {len(line and '12')} times"):
        source.edit(sources)


def test_unpack_refuses_a_path_outside(tmp_path):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("horovod-0.28.1/../../outside"))
    with pytest.raises(CommandError, match="outside"):
        source.unpack(path, tmp_path / "target")


def test_check_sdist_names_what_is_wrong(tmp_path):
    text = tmp_path / "text"
    text.write_text("no archive")
    other = write_sdist(tmp_path / "other.tar.gz", top="horovod-0.27.0")
    for path, reason in ((tmp_path / "absent", "not a file"), (text, "not a tar archive"), (other, "horovod-0.27.0")):
        with pytest.raises(UsageError, match=rf"`--sdist` must be .*Received: --sdist={path}, which .*{reason}"):
            source.check_sdist(str(path))


def test_fetch_checks_what_pip_brought(tmp_path, monkeypatch):
    def capture_download(command, folder):
        write_sdist(folder / source.SDIST_NAME)
        return 0, []

    monkeypatch.setattr(source, "capture", capture_download)
    with pytest.raises(CommandError, match="SHA-256 differs"):
        source.fetch(tmp_path)
    assert not (tmp_path / source.SDIST_NAME).exists()
    monkeypatch.setattr(source, "sha256", lambda path: source.SDIST_SHA256)
    assert source.fetch(tmp_path).exists()
    monkeypatch.setattr(source, "capture", lambda *_: pytest.fail("downloaded again"))
    assert source.fetch(tmp_path).exists()


def test_fetch_shows_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "capture", lambda *_: (1, ["ERROR: no network"]))
    with pytest.raises(CommandError, match=r"no network\nWithout a network, bring horovod-0\.28\.1\.tar\.gz"):
        source.fetch(tmp_path)


# What is missing


def test_missing_tools_are_all_named_with_the_command():
    found = needs.missing(Options(mpi=True), {"PATH": "/nowhere"}, ["g++"])
    text = needs.report(found)
    assert [need.name for need in found] == ["g++", "cmake", "make", "a framework", "mpicxx"]
    assert "apt-get install -y g++ cmake make libopenmpi-dev openmpi-bin" in text


def test_missing_headers_and_modules(monkeypatch, tmp_path):
    monkeypatch.setattr(needs.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    text = needs.report(needs.missing(Options(frameworks=BOTH), {"PATH": "/nowhere"}, ["g++"]))
    assert f"Python.h: Python's headers, looked for in {tmp_path}" in text
    assert "pip install pip setuptools packaging wheel" in text


def test_missing_cuda_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(needs, "torch_build", lambda: {"cuda": "none"})
    options = Options(frameworks=BOTH, nccl=True)
    assert "name the CUDA toolkit's folder with --cuda-home" in needs.report(needs.missing(options, {}, ["g++"]))
    text = needs.report(needs.missing(replace(options, cuda_home=tmp_path, nccl_home=tmp_path), {}, ["g++"]))
    assert "a PyTorch for CUDA" in text
    assert f"nvcc: for --nccl, looked for at {tmp_path}/bin/nvcc" in text
    assert f"looked for at {tmp_path}/include/nccl.h" in text
    for name in ("bin/nvcc", "include/nccl.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.setattr(needs, "torch_build", lambda: {"cuda": "13.0"})
    left = needs.missing(replace(options, cuda_home=tmp_path, nccl_home=tmp_path), {}, ["g++"])
    assert not {need.name for need in left} & {"nvcc", "nccl.h", "a PyTorch for CUDA"}


def test_old_cmake_is_refused(tmp_path):
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho cmake version 3.9.1\n")
    cmake.chmod(0o755)
    found = needs.missing(Options(frameworks=BOTH), {"HOROVOD_CMAKE": str(cmake)}, ["g++"])
    assert "a newer cmake: at least version 3.13, found 3.9" in needs.report(found)


# Errors in a log

LOGS = {
    "compiler": (
        "  [ 10%] Building CXX object gloo/error.cc.o\n"
        "  /h/half.h:76:11: warning: breaks strict-aliasing rules [-Werror]\n"
        "  /h/mpi_ops.cc:118:27: error: 'Unknown' is not a member of 'errors'\n"
        "    118 |     return errors::Unknown();\n"
        "        |                    ^~~~~~~\n"
        "  make[2]: *** [x.dir/build.make:76: x.o] Error 1\n"
        "  subprocess.CalledProcessError: Command 'cmake' returned non-zero exit status 2.\n"
        "  ERROR: Failed building wheel for horovod\n",
        "  /h/mpi_ops.cc:118:27: error: 'Unknown' is not a member of 'errors'\n"
        "    118 |     return errors::Unknown();\n"
        "        |                    ^~~~~~~",
    ),
    "fatal": (
        "a.cc:1:10: fatal error: xla/x.h: No such file\nb.cc:1:1: error: later",
        "a.cc:1:10: fatal error: xla/x.h: No such file",
    ),
    "nvcc": (
        "/h/cuda_kernels.cu(12): error: identifier undefined\n",
        "/h/cuda_kernels.cu(12): error: identifier undefined",
    ),
    "driver": (
        "x\nnvcc fatal : nothing\ng++: error: unrecognized option '-x'\n",
        "g++: error: unrecognized option '-x'",
    ),
    "cmake": (
        "-- Detecting\nCMake Error at CMakeLists.txt:5 (find_package):\n  Could not find NCCL\n\n-- Incomplete\n",
        "CMake Error at CMakeLists.txt:5 (find_package):\n  Could not find NCCL",
    ),
    "linker": (
        "/usr/bin/ld: a.o: undefined reference to `f'\ncollect2: error: ld",
        "/usr/bin/ld: a.o: undefined reference to `f'",
    ),
    "python": (
        "Traceback\n  ModuleNotFoundError: No module named 'packaging'\nend",
        "  ModuleNotFoundError: No module named 'packaging'",
    ),
    "unknown": ("one\n\ntwo\n", "one\ntwo"),
    "empty": ("", "the log is empty"),
}


@pytest.mark.parametrize("name", LOGS)
def test_first_error_of_a_log(name):
    text, expected = LOGS[name]
    assert compilation.first_error(text) == expected


def test_killed_compiler_is_explained():
    text = "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\na.cc:1:1: error: other"
    assert "fewer --jobs" in compilation.first_error(text)


# The child process


def test_run_logged_keeps_every_line(tmp_path):
    seen = []
    command = [
        sys.executable,
        "-c",
        "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(3)",
    ]
    assert run_logged(command, tmp_path, {}, tmp_path / "log", seen.append) == 3
    assert seen == ["out\n", "err\n"]
    assert (tmp_path / "log").read_text().endswith("out\nerr\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interruption_ends_the_whole_build(tmp_path, number):
    def interrupt(line):
        pids.append(int(line))
        os.kill(os.getpid(), number)

    pids: list[int] = []
    script = "sleep 60 & echo $!; wait"
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        run_logged(["/bin/sh", "-c", script], tmp_path, {"PATH": "/usr/bin:/bin"}, tmp_path / "log", interrupt)
    while is_running(pids[0]) and time.monotonic() < started + 20:
        time.sleep(0.01)
    assert time.monotonic() < started + 20, "the grandchild went on"
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_progress_without_a_terminal_prints_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(compilation, "LINE_SECONDS", 0.0)
    with compilation.Progress() as progress:
        for line in ("  [ 42%] Building CXX object a.cc.o\n", "  [ 30%] Building CXX object b.cc.o\n", "warning\n"):
            progress.show(line)
    assert [line.split(" after")[0] for line in capsys.readouterr().err.splitlines()] == ["compiling Horovod:  42%"] * 3


def test_progress_on_a_terminal_is_a_bar():
    script = "from hvd_sparse.cli.horovod_wheel.compilation import Progress\nwith Progress() as progress:\n"
    script += "    progress.show('[ 42%] Building CXX object horovod/common/half.cc.o')\n"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what reading reports when the other side is closed
        while block := os.read(ours, 1000):
            shown += block
    os.close(ours)
    assert process.wait() == 0, shown
    assert b"Horovod  42%|" in shown
    assert b"half.cc.o" in shown
