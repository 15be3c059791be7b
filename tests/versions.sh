#!/usr/bin/env bash
# The tests of `make test` on another Python, or with other versions of the packages, each in an environment of its own:
#     tests/versions.sh 3.12 | 3.13 | lowest | newest
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
venv=build/versions/$name
case $name in
    lowest | newest) python=python3.11 ;;
    *) python=python$name ;;
esac
if [ "$name" = newest ] || ! cmp -s "$venv/installed" <(cat requirements.txt tests/lowest.txt); then
    "$python" -m venv --clear "$venv"
    pip=("$venv/bin/python" -m pip install --quiet)
    if [ "$name" = newest ]; then
        sed 's/==[^ ]*//; s/^\(gymnasium.*\)$/\1<2/' requirements.txt >"$venv/requirements.txt"
    else
        cp requirements.txt "$venv"
    fi
    "${pip[@]}" -r "$venv/requirements.txt"
    if [ "$name" = lowest ]; then
        "${pip[@]}" -r tests/lowest.txt
        "$venv/bin/python" -m pip uninstall --quiet --yes onnxruntime # the extra `export` needs a newer torch
    fi
    "${pip[@]}" --no-deps -e .
    cat requirements.txt tests/lowest.txt >"$venv/installed"
fi
"$venv/bin/python" -m pytest -n 4 --dist worksteal -m "not long"
