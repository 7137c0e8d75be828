#!/bin/sh
# All that is measured and tested on a machine with a GPU, within 15 minutes. Standard output is JSON lines.
#
#     tests/bench/gpu.sh [--wheels DIR] [--minutes N] [--check]
#
# The environment is .venv of this folder where it exists, or else one that is installed from the wheels in DIR, without
# a network: `pip download -d DIR '.[dev]'` on a machine with one fills DIR. --check ends once the GPUs are told.
set -eu
cd "$(dirname "$0")/../.."
wheels="" minutes=15 check=""
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels=$(realpath "$2"); shift 2 ;;
        --minutes) minutes=$2; shift 2 ;;
        --check) check=--check; shift ;;
        *) echo "gpu.sh: unknown argument $1; usage: tests/bench/gpu.sh [--wheels DIR] [--minutes N] [--check]" >&2; exit 64 ;;
    esac
done
python=.venv/bin/python
if [ ! -x "$python" ]; then
    if [ -z "$wheels" ]; then
        echo "gpu.sh: there is no .venv here: \`make setup\`, or give the wheels to install with --wheels DIR" >&2
        exit 69
    fi
    python3 -m venv .venv
    "$python" -m pip install --quiet --no-index --find-links "$wheels" -e '.[dev]' >&2
fi
exec "$python" tests/bench/gpu_parts.py --minutes "$minutes" $check
