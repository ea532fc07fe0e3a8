#!/usr/bin/env bash
# set_up.sh PYTHON [TORCH_REQUIREMENT] readies a Python for building.
# PYTHON is .venv/bin/python, made here when it is missing, or a Python that already has torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
torch=${2:-torch}

if [[ $python == .venv/* && ! -x $python ]]; then
  options=()
  # A system Python that pip must not touch may have a torch: the environment then uses that one.
  python3 -c 'import torch' 2>/dev/null && options+=(--system-site-packages)
  if ! python3 -m venv "${options[@]}" .venv; then
    rm -rf .venv
    echo "python3 cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
    exit 1
  fi
fi

if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "installing $torch, a download of up to a few gigabytes" >&2
fi
# In one call, so that torch's own bounds on setuptools hold. Does nothing when all of it is there.
"$python" -m pip install --quiet --disable-pip-version-check \
  'setuptools>=77.0.3' 'ninja>=1.11' "$torch"
