#!/usr/bin/env bash
# Generates the Python stubs of proto/baton/v1 below a folder (default: the repository).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
bin=$(dirname "${PYTHON:-.venv/bin/python}")
PATH="$bin:$PATH" "${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -Iproto \
    --python_out="$out" --mypy_out="quiet:$out" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
    proto/baton/v1/*.proto
