#!/usr/bin/env bash
# Makes .venv with the frameworks, Horovod and this project; installs the Debian packages that are missing where it may.
# Run it again whenever: what is there already stays. PYTHON=python3.12 bash ci/setup.sh chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=.venv
stamp_file=$venv/.hvd_sparse_setup
data=/usr/share/datasets/fashion-mnist
text=/usr/share/dictd/gcide.dict.dz
words=/usr/share/wordnet/data.noun

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Runs a command as root, or fails where that is not possible without a password.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

apt_updated=
apt_install() {
    local options=(-qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
    if [ -z "$apt_updated" ]; then
        as_root apt-get "${options[@]}" update >/dev/null </dev/null || return 1
        apt_updated=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get "${options[@]}" -y install --no-install-recommends "$@" >/dev/null </dev/null
}

# Debian packages that the build and the virtual environment need and this machine lacks, one word each.
missing_packages() {
    local headers
    command -v g++ >/dev/null || echo g++
    command -v cmake >/dev/null || echo cmake
    command -v make >/dev/null || echo make
    command -v "$python" >/dev/null || { echo python3 python3-venv python3-dev; return 0; }
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$headers/Python.h" ] || echo python3-dev
}

install_packages() {
    local needed
    mapfile -t needed < <(missing_packages)
    if [ ${#needed[@]} = 0 ]; then return 0; fi
    may_install || die "missing: ${needed[*]}. Run: sudo apt-get install -y ${needed[*]}"
    say "installing with apt-get: ${needed[*]}"
    apt_install "${needed[@]}" || die "apt-get could not install: ${needed[*]}"
    mapfile -t needed < <(missing_packages)
    [ ${#needed[@]} = 0 ] || die "apt-get does not help $python, which lacks: ${needed[*]}. PYTHON=... names another one."
}

# Images and a graph for the examples and tests, text for a benchmark. Not worth failing for: the examples also take --data DIR.
install_data() {
    local needed=()
    [ -d "$data" ] || needed+=(dataset-fashion-mnist)
    [ -e "$text" ] || needed+=(dict-gcide)
    [ -e "$words" ] || needed+=(wordnet-base)
    if [ ${#needed[@]} = 0 ]; then return 0; fi
    if may_install; then
        say "installing with apt-get: ${needed[*]}"
        apt_install "${needed[@]}" && return 0
    fi
    say "data for examples and benchmarks is missing. Run: sudo apt-get install -y ${needed[*]}"
}

# Tools of ci/netlab.py, also where only root finds them.
missing_lab_packages() {
    local PATH=$PATH:/usr/sbin:/sbin
    command -v sshd >/dev/null || echo openssh-server
    command -v ssh >/dev/null || echo openssh-client
    { command -v ip && command -v tc; } >/dev/null || echo iproute2
}

# Whether a package that brings a service will not start it, now or with the machine: so it is in containers.
services_stay_off() {
    local answer=0
    [ ! -d /run/systemd/system ] && [ -x /usr/sbin/policy-rc.d ] || return 1
    /usr/sbin/policy-rc.d ssh start >/dev/null || answer=$?
    [ "$answer" = 101 ]
}

# Not worth failing for: tests/netlab is skipped without. An SSH server that stays is for the machine's owner to decide.
install_lab() {
    local needed
    mapfile -t needed < <(missing_lab_packages)
    if [ ${#needed[@]} = 0 ]; then return 0; fi
    if services_stay_off && may_install; then
        say "installing with apt-get: ${needed[*]}"
        apt_install "${needed[@]}" && return 0
    fi
    say "ci/netlab.py and tests/netlab lack: ${needed[*]}. Run: sudo apt-get install -y ${needed[*]}"
}

# Changes whenever pip could have something to do.
stamp() {
    { "$python" -VV; echo "$PWD"; cat setup.py pyproject.toml ci/constraints.txt ci/setup.sh; } | sha256sum | cut -d' ' -f1
}

install_python_packages() {
    local now pip
    now=$(stamp)
    if [ -x $venv/bin/python ] && [ "$(cat $stamp_file 2>/dev/null)" = "$now" ]; then return 0; fi
    if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
        say "making $venv with $("$python" -V)"
        "$python" -m venv --clear $venv
    fi
    rm -f $stamp_file
    pip="$venv/bin/python -m pip --disable-pip-version-check -qq install -c ci/constraints.txt"
    $pip setuptools wheel packaging
    say "installing torch and tensorflow-cpu: some minutes on a new machine"
    $pip torch==2.13.0 tensorflow-cpu==2.21.0
    $pip --no-deps tf-keras==2.21.0  # it would bring the other TensorFlow package along
    say "installing the project and its test tools"
    $pip --no-build-isolation -e '.[test,plot,gnn]'
    echo "$now" >$stamp_file
}

install_packages
install_data
install_lab
install_python_packages
# Finds the wheel in the cache, or takes the minutes to build it.
$venv/bin/python -m hvd_sparse.cli build-horovod --install >/dev/null
say "ready: $venv/bin/python, $venv/bin/horovodrun"
