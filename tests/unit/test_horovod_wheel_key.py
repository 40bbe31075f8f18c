"""What `hvd-sparse build-horovod` builds: the cache key and the environment of the compilation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvd_sparse.cli.horovod_wheel import compilation, key
from hvd_sparse.cli.horovod_wheel.options import Options, build_environment, horovod_variables
from hvd_sparse.cli.horovod_wheel.process import capture

BOTH = {"torch": ("torch", "2.13.0+cpu"), "tensorflow": ("tensorflow-cpu", "2.21.0")}


# The key


def make_key(options=None, environ=None, compiler=("g++",), digest="abc"):
    return key.compute_key(options or Options(frameworks=BOTH), environ or {}, compiler, digest)


def test_equal_input_gives_equal_keys():
    assert make_key() == make_key()
    assert key.key_hash(make_key()) == key.key_hash(json.loads(json.dumps(make_key())))


@pytest.mark.parametrize(
    "options",
    [
        Options(frameworks={"torch": BOTH["torch"]}),
        Options(frameworks={**BOTH, "torch": ("torch", "2.13.0+cu130")}),
        Options(frameworks={**BOTH, "tensorflow": ("tensorflow", "2.21.0")}),
        Options(frameworks=BOTH, mpi=True),
        Options(frameworks=BOTH, gloo=False, mpi=True),
        Options(frameworks=BOTH, nccl=True, cuda_home=Path("/cuda")),
        Options(frameworks=BOTH, nccl=True, cuda_home=Path("/cuda"), nccl_home=Path("/nccl")),
    ],
)
def test_every_option_changes_the_key(options):
    others = [make_key(), make_key(Options(frameworks=BOTH, nccl=True, cuda_home=Path("/elsewhere")))]
    assert key.key_hash(make_key(options)) not in {key.key_hash(other) for other in others}


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (key, "HOROVOD_VERSION", "0.29.0"),
        (key, "RECIPE_VERSION", 99),
        (key, "compiler_version", lambda compiler: "g++ 13"),
        (key, "cpu_flags", lambda: "avx"),
        (key, "torch_build", lambda: {"cxx11_abi": "0"}),
        (key.platform, "python_version_tuple", lambda: ("3", "99", "0")),
        (key.platform, "libc_ver", lambda: ("glibc", "2.99")),
        (key.sysconfig, "get_platform", lambda: "linux-aarch64"),
        (key.sysconfig, "get_config_var", lambda name: "cpython-399"),
    ],
)
def test_every_version_changes_the_key(monkeypatch, module, name, value):
    before = key.key_hash(make_key())
    monkeypatch.setattr(module, name, value)
    assert key.key_hash(make_key()) != before


def test_flags_and_sources_change_the_key_and_run_time_variables_do_not():
    assert make_key(environ={"HOROVOD_CPU_OPERATIONS": "MPI", "HOROVOD_LOG_LEVEL": "debug"}) == make_key()
    assert make_key(environ={"CXXFLAGS": "-O0"}) != make_key()
    assert make_key(environ={"HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}) != make_key()
    assert make_key(digest="other") != make_key()


def test_torch_build_is_read_from_its_files(tmp_path):
    config = tmp_path / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    config.parent.mkdir(parents=True)
    config.write_text('set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    (tmp_path / "version.py").write_text("__version__ = '2.1'\ncuda: Optional[str] = '12.1'\nhip = None\n")
    assert key.torch_build(tmp_path) == {"cxx11_abi": "0", "cuda": "12.1", "hip": "none"}
    config.unlink()
    assert key.torch_build(tmp_path)["cxx11_abi"] == "1"


def test_cpu_flags_are_those_that_the_build_uses(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu f16c avx avx2\n")
    assert key.cpu_flags(cpuinfo) == "avx f16c"
    assert key.cpu_flags(tmp_path / "absent") == ""


def test_finding_the_key_imports_no_framework():
    script = "import sys; from hvd_sparse.cli import main; main(['build-horovod', '--print-key'])\n"
    script += "sys.exit(bool({'torch', 'tensorflow', 'numpy', 'horovod'} & set(sys.modules)))"
    code, lines = capture([sys.executable, "-c", script])
    assert code == 0, lines
    assert json.loads("\n".join(lines))["horovod"] == "0.28.1"


# The environment of the build


def test_build_environment_follows_the_options_alone():
    environ = {"PATH": "/bin", "HOROVOD_WITH_MPI": "1", "HOROVOD_GPU_OPERATIONS": "MPI", "HOROVOD_NCCL_LINK": "SHARED"}
    result = build_environment(Options(frameworks=BOTH), environ, Path("/w/c++"), 3)
    assert result["CXX"] == "/w/c++"
    assert result["MAKEFLAGS"] == "-j3"
    assert "HOROVOD_WITH_MPI" not in result
    assert "HOROVOD_GPU_OPERATIONS" not in result
    assert result["HOROVOD_NCCL_LINK"] == "SHARED"


def test_variables_for_cpus_and_gpus():
    cpu = horovod_variables(Options(frameworks={"torch": BOTH["torch"]}), {})
    assert cpu == {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
    }
    gpu = Options(frameworks=BOTH, mpi=True, nccl=True, cuda_home=Path("/cuda"), nccl_home=Path("/nccl"))
    variables = horovod_variables(gpu, {})
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variables["HOROVOD_CUDA_HOME"] == "/cuda"
    assert variables["HOROVOD_NCCL_HOME"] == "/nccl"
    assert variables["HOROVOD_WITH_MPI"] == variables["HOROVOD_WITH_GLOO"] == "1"
    assert "HOROVOD_CPU_OPERATIONS" not in variables
    assert build_environment(gpu, {"PATH": "/bin"}, Path("/w"), 1)["PATH"] == "/cuda/bin:/bin"


def test_wrapper_ends_in_the_standard_and_keeps_arguments(tmp_path):
    wrapper = compilation.write_wrapper(tmp_path, [sys.executable, "-c", "import sys; print(sys.argv[1:])"])
    assert capture([str(wrapper), "-std=c++14", "a b.cc"]) == (
        0,
        [str(["-include", "cstdint", "-std=c++14", "a b.cc", "-std=c++17"])],
    )
