#!/usr/bin/env bash
# Creates .venv with everything that development needs. Does nothing if it is up to date.
#   PYTHON  interpreter, 3.11 or 3.12 (default: the first one found)
#   TORCH   requirement of torch (default: torch==2.13.0), installed in a separate step
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH:-torch==2.13.0}
stamp=.venv/.installed
wanted=$(cat pyproject.toml constraints.txt <(echo "$TORCH") | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

say() { echo "setup: $*" >&2; }

fits() {
    command -v "$1" >/dev/null &&
        "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

install_debian_packages() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "needs Python 3.11 or 3.12 with venv; on Debian: apt-get install python3 python3-venv"
        exit 2
    fi
    say "installing python3 and python3-venv with apt-get"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-venv >&2
}

if ! python=$(find_python) || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    install_debian_packages
    python=$(find_python) || { say "found no Python 3.11 or 3.12 (PYTHON= names one)"; exit 2; }
fi

if ! [ -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
rm -f "$stamp"
say "installing $TORCH (once; this may take minutes)"
# Python compiles what is imported when it is first imported; compiling all of it takes as long again. The most
# is what tests import of torch and transformers, in several processes at once: it is compiled in advance.
pip=(.venv/bin/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt)
"${pip[@]}" "$TORCH" uv >&2
say "installing the rest"
# uv takes a sixth of pip's time. It does not read pip's configuration, so it is told the registry, and may still
# find nothing.
index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)
uv=(.venv/bin/uv pip install -q --python .venv/bin/python -c constraints.txt ${index:+--default-index "$index"})
if ! "${uv[@]}" -e '.[dev]' >&2; then
    say "uv could not; installing the rest with pip"
    "${pip[@]}" -e '.[dev]' >&2
fi
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import transformers.models.llama.modeling_llama' >/dev/null 2>&1 || true
echo "$wanted" >"$stamp"
say "done"
