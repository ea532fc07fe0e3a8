#!/usr/bin/env bash
# Readies a Python for building and prints nothing but what went wrong: set_up.sh PYTHON [TORCH_REQUIREMENT].
# PYTHON is .venv/bin/python, made here when it is missing, or a Python that already has torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
torch=${2:-torch}

if [[ $python == .venv/* && ! -x $python ]]; then
  options=()
  # A system Python that pip must not touch may still have a torch of its own: use that one from inside the environment.
  python3 -c 'import torch' 2>/dev/null && options+=(--system-site-packages)
  if ! python3 -m venv "${options[@]}" .venv; then
    rm -rf .venv
    echo "python3 cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
    exit 1
  fi
fi

"$python" -m pip install --quiet --disable-pip-version-check 'setuptools>=70.1' 'ninja>=1.11'
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "installing $torch, a download of up to a few gigabytes" >&2
  "$python" -m pip install --disable-pip-version-check "$torch"
fi
