#!/bin/sh
# Regenerates the wire code. Run through `make proto`; `make check` fails when the result differs from what is committed.
set -eu
cd "$(dirname "$0")"
out=${1:-.}
"${PYTHON:-python3}" -m grpc_tools.protoc -I . --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" geofed_pb/v1/*.proto
