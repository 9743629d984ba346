#!/usr/bin/env bash
# Fails and prints the differences if baton/v1 is not up to date with proto/.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/generate_stubs.sh "$fresh"
diff --recursive --brief --exclude=__pycache__ --exclude=__init__.py "$fresh/baton/v1" baton/v1 ||
    { echo "generated code is out of date: make stubs" >&2; exit 1; }
