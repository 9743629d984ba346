#!/usr/bin/env bash
# Installs what the test of the images needs, with apt-get, and runs it: both images are built and run (about half an
# hour, 25 GB of disk). Needs root on Debian. Arguments are pytest's.
#   BATON_CPU_WHEELS  folder with torch's CPU wheel (default: pip is asked for it)
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(buildah ca-certificates iproute2 mmdebstrap runc util-linux)
missing=()
for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
    echo "image_proof: installing ${missing[*]}" >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi
tools/setup.sh
exec .venv/bin/pytest -m slow -s -v tests/images "$@"
