#!/bin/sh
# Fails when the committed wire code is not what the .proto files generate.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
case "${PYTHON:-python3}" in /*) ;; */*) PYTHON="$(pwd)/$PYTHON" ;; esac
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
PYTHON="${PYTHON:-python3}" "$here/generate.sh" "$fresh"
for file in "$fresh"/geofed_pb/v1/*; do
    if ! cmp -s "$file" "$here/geofed_pb/v1/$(basename "$file")"; then
        echo "proto: geofed_pb/v1/$(basename "$file") is stale; run \`make proto\`" >&2
        exit 1
    fi
done
echo "proto: generated code is up to date"
