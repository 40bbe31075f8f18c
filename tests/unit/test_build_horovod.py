"""The command `hvd-sparse build-horovod` without a real build: a fake takes the place of pip."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from hvd_sparse.cli import build_horovod, main
from hvd_sparse.cli.errors import CommandError, UsageError
from hvd_sparse.cli.horovod_wheel import compilation, needs, source
from hvd_sparse.cli.horovod_wheel.cache import EXTENSIONS, WheelCache, check_wheel, default_folder
from hvd_sparse.cli.horovod_wheel.options import chosen_frameworks
from hvd_sparse.cli.horovod_wheel.process import capture

BOTH = {"torch": ("torch", "2.13.0+cpu"), "tensorflow": ("tensorflow-cpu", "2.21.0")}
WHEEL_NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def write_wheel(folder: Path, frameworks=tuple(BOTH)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        for framework in frameworks:
            archive.writestr(EXTENSIONS[framework] + ".so", b"compiled")
    return path


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


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A complete machine with a cache folder of its own; `fake.compile` counts compilations and can be told to fail."""

    class Fake:
        sdist = write_sdist(tmp_path / source.SDIST_NAME)
        cache = tmp_path / "cache"
        builds = 0
        code = 0
        output = ""
        frameworks = tuple(BOTH)
        seconds = 0.0

        def compile(self, sources, folder, environment, log):
            self.builds += 1
            self.environment = environment
            self.cmake_lists = (sources / source.DROPPED_FROM).read_text()
            log.write_text(self.output)
            time.sleep(self.seconds)
            if self.code == 0:
                write_wheel(folder, self.frameworks)
            return self.code

        def run(self, *words):
            return main(["build-horovod", "--cache-dir", str(self.cache), "--sdist", str(self.sdist), *words])

    fake = Fake()
    monkeypatch.setattr(compilation, "compile_wheel", fake.compile)
    monkeypatch.setattr(build_horovod, "installed_frameworks", lambda: dict(BOTH))
    monkeypatch.setattr(needs, "missing", lambda *_: [])
    return fake


# The cache and the command


def test_second_call_finds_the_wheel(fake, capsys):
    assert fake.run() == 0
    first = capsys.readouterr()
    assert fake.run() == 0
    second = capsys.readouterr()
    assert fake.builds == 1
    assert second.out == first.out
    assert "building Horovod for torch 2.13.0+cpu, tensorflow-cpu 2.21.0" in first.err
    assert second.err == ""
    wheel = Path(second.out.strip())
    assert json.loads((wheel.parent / "key.json").read_text())["frameworks"]["torch"] == "torch 2.13.0+cpu"
    assert source.DROPPED_LINE not in fake.cmake_lists
    assert list((fake.cache / "building").iterdir()) == []


def test_force_and_other_options_build_again(fake):
    for words in ([], ["--force"], ["--frameworks", "torch"], ["--frameworks", "torch"]):
        assert fake.run(*words) == 0
    assert fake.builds == 3


def test_damaged_wheel_is_built_again(fake, capsys):
    assert fake.run() == 0
    wheel = Path(capsys.readouterr().out.strip())
    wheel.write_bytes(wheel.read_bytes()[:40])
    assert fake.run() == 0
    assert fake.builds == 2
    assert zipfile.is_zipfile(wheel)


def test_failed_build_shows_the_error_and_leaves_no_wheel(fake, capsys):
    fake.code, fake.output = 1, "preparing\n/h/a.cc:1:2: error: wrong\nmake: Error 2\n"
    assert fake.run() == 1
    error = capsys.readouterr().err
    assert "the build failed:\n/h/a.cc:1:2: error: wrong\nFull log: " in error
    log = Path(error.rsplit("Full log: ", 1)[1].strip())
    assert log.read_text() == fake.output
    assert not list(fake.cache.glob("wheels/*/*.whl"))
    fake.code = 0
    assert fake.run() == 0


def test_build_without_a_framework_inside_is_refused(fake, capsys):
    fake.frameworks = ("torch",)
    assert fake.run() == 1
    assert "left out the compiled part for tensorflow" in capsys.readouterr().err
    assert not list(fake.cache.glob("wheels/*/*.whl"))


def test_two_builds_at_once_compile_once(fake):
    fake.seconds = 0.3
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(fake.run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0]
    assert fake.builds == 1


def test_leftover_of_an_interrupted_build_is_removed(tmp_path):
    cache = WheelCache(tmp_path)
    with pytest.raises(KeyboardInterrupt), cache.workshop({}) as folder:
        raise KeyboardInterrupt
    folder.mkdir(parents=True)
    (folder / "half").touch()
    with cache.workshop({}) as again:
        assert again == folder
        assert list(again.iterdir()) == []


def test_check_wheel_finds_damage(tmp_path):
    wheel = write_wheel(tmp_path)
    assert check_wheel(tmp_path, BOTH) == wheel
    data = bytearray(wheel.read_bytes())
    data[data.index(b"compiled")] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(CommandError, match="broken wheel"):
        check_wheel(tmp_path, BOTH)
    wheel.unlink()
    with pytest.raises(CommandError, match="found 0"):
        check_wheel(tmp_path, BOTH)


def test_dest_log_and_print_key(fake, tmp_path, capsys):
    assert fake.run("--dest", str(tmp_path / "wheels"), "--log", str(tmp_path / "logs" / "build.log")) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "wheels" / WHEEL_NAME
    assert (tmp_path / "wheels" / WHEEL_NAME).exists()
    assert (tmp_path / "logs" / "build.log").exists()
    assert fake.run("--print-key") == 0
    assert (fake.cache / "wheels" / json.loads(capsys.readouterr().out)["hash"] / WHEEL_NAME).exists()


def test_install_replaces_another_wheel_and_skips_the_same(fake, monkeypatch):
    calls = []
    monkeypatch.setattr(build_horovod, "capture", lambda command: calls.append(command) or (0, []))
    monkeypatch.setattr(build_horovod, "_installed_digest", lambda: "other")
    assert fake.run("--install") == 0
    assert [("--force-reinstall" in call, "--no-deps" in call) for call in calls] == [(True, True), (False, False)]
    digest = source.sha256(next(fake.cache.glob("wheels/*/*.whl")))
    monkeypatch.setattr(build_horovod, "_installed_digest", lambda: digest)
    assert fake.run("--install") == 0
    assert len(calls) == 2


def test_failed_install_is_reported(fake, monkeypatch, capsys):
    monkeypatch.setattr(build_horovod, "capture", lambda command: (1, ["ERROR: read-only"]))
    assert fake.run("--install") == 1
    assert "ERROR: read-only" in capsys.readouterr().err


def test_missing_tool_stops_before_the_build(fake, monkeypatch, capsys):
    monkeypatch.setattr(needs, "missing", lambda *_: [needs.Need("cmake", "compiles", debian="cmake")])
    assert fake.run() == 1
    assert "cmake: compiles\nOn Debian or Ubuntu: apt-get install -y cmake" in capsys.readouterr().err
    assert fake.builds == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "`--jobs` must be at least 1. Received: --jobs=0."),
        (["--jobs=two"], "`--jobs` must be a whole number. Received: --jobs=two."),
        (["--no-gloo"], "`--no-gloo` needs `--mpi`: Horovod starts over one of them. Received: --no-gloo alone."),
        (["--frameworks", "jax"], "out of torch, tensorflow, joined by commas. Received: --frameworks=jax."),
        (["--frameworks", ","], "`--frameworks` must name at least one framework. Received: --frameworks=,."),
        (["--cuda-home", "/usr"], "add it. Received: --cuda-home=/usr."),
        (["--nccl", "--nccl-home", "/nowhere"], "`--nccl-home` must be a folder. Received: --nccl-home=/nowhere."),
        (["--dest", "/dev/null/x"], "`--dest` must be in a place that can be written. Received: /dev/null/x"),
        (["--log", "/"], "`--log` must be a file. Received: --log=/, which is a folder."),
        (["--job", "2"], "unrecognized arguments: --job 2. See `hvd-sparse build-horovod --help`."),
    ],
)
def test_wrong_arguments_exit_with_2(fake, capsys, words, message):
    assert fake.run(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert fake.builds == 0


def test_frameworks_must_be_installed():
    assert chosen_frameworks("torch", BOTH) == {"torch": BOTH["torch"]}
    assert chosen_frameworks(None, BOTH) == BOTH
    with pytest.raises(UsageError, match="names tensorflow, which is not installed: run `pip install tensorflow`"):
        chosen_frameworks("torch,tensorflow", {"torch": BOTH["torch"]})


def test_default_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/hvd_sparse")
    assert default_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/someone/.cache/hvd_sparse")
    assert default_folder({}) == Path("/home/someone/.cache/hvd_sparse")


# The console script


def test_help_version_and_wrong_commands(capsys):
    assert main(["--help"]) == 0
    assert "build-horovod" in capsys.readouterr().out
    assert main(["build-horovod", "--help"]) == 0
    assert "examples:" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hvd-sparse ")
    assert main([]) == 2
    assert main(["bild-horovod"]) == 2
    assert "`command` must be one of build-horovod" in capsys.readouterr().err


def test_module_runs_as_a_script():
    assert capture([sys.executable, "-m", "hvd_sparse.cli", "nothing"])[0] == 2


def test_interrupted_command_exits_with_130(fake, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation, "compile_wheel", interrupt)
    assert fake.run() == 130
    assert not list(fake.cache.glob("wheels/*/*.whl"))


def test_sdist_of_other_content_has_another_key(fake, tmp_path, capsys):
    assert fake.run("--print-key") == 0
    first = json.loads(capsys.readouterr().out)["hash"]
    shutil.move(fake.sdist, tmp_path / "old.tar.gz")
    write_sdist(fake.sdist, line="")
    assert fake.run("--print-key") == 0
    assert json.loads(capsys.readouterr().out)["hash"] != first
