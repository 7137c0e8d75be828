#!/bin/sh
# Sets up this checkout: a virtual environment in .venv, and Debian packages if this user may install them.
# Usage: deploy/setup.sh demo|dev
set -eu
cd "$(dirname "$0")/.."
kind=${1:-dev}
say() { echo "setup: $*" >&2; }

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="no"; fi
fi
updated=""
# Installs Debian packages; the first argument states the consequence of missing ones.
install() {
    purpose=$1
    shift
    missing=""
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
    [ -z "$missing" ] && return 0
    if [ "$as_root" = "no" ] || ! command -v apt-get >/dev/null 2>&1; then
        say "not installed, since this user has no permission:$missing ($purpose)"
        return 0
    fi
    [ -n "$updated" ] || { $as_root apt-get update -qq >/dev/null 2>&1 || true; updated=yes; }
    say "installing Debian packages:$missing"
    # shellcheck disable=SC2086
    if ! DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1; then
        say "installation failed:$missing ($purpose)"
    fi
}

find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
}

python=$(find_python)
if [ -z "$python" ]; then
    install "Python 3.11 or newer is needed" python3 python3-venv
    python=$(find_python)
    [ -n "$python" ] || { say "Python 3.11 or newer not found"; exit 1; }
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating a virtual environment in .venv"
    rm -rf .venv
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        install "without it there is no virtual environment" python3-venv
        rm -rf .venv
        "$python" -m venv .venv || { say "cannot create the virtual environment"; exit 1; }
    fi
fi

say "installing Python packages (the first time this takes a minute or two)"
extras="s3,demo,dashboard"
[ "$kind" = dev ] && extras="dev"
.venv/bin/python -m pip install -qq --disable-pip-version-check -c deploy/constraints.txt -e ".[$extras]"

install "the WAN is then not shaped" iproute2
install "job code then runs without a sandbox, or not at all" bubblewrap libseccomp2
if [ "$kind" = dev ]; then
    install "the dashboard is then not tested in a browser" chromium chromium-driver fonts-dejavu-core
    install "some tests are then skipped" iputils-ping postgresql redis-server util-linux user-mode-linux
    # Not on a developer's machine, where they would start services or take the place of another Docker.
    [ -z "${CI:-}" ] || install "images and alerts are then not tested" docker.io docker-compose debootstrap mmdebstrap iptables prometheus
    [ -z "${CI:-}" ] || install "train.compile is then not tested" g++
fi
