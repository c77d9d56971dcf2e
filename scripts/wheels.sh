#!/bin/sh
# Wheels of what a server needs beside torch, numpy, tokenizers and safetensors, in the versions installed here, for a
# machine that has those and no network:  scripts/wheels.sh FOLDER [PYTHON]  and there
#   python -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE
set -eu
folder=${1:?usage: scripts/wheels.sh FOLDER [PYTHON]}
wanted='grpcio|grpcio-health-checking|grpcio-reflection|grpcio-status|protobuf|googleapis-common-protos|msgspec|pydantic'
wanted="$wanted|pydantic_core|annotated-types|typing-inspection|typing_extensions|PyYAML"
wanted="$wanted|uvloop|hpack|cryptography|cffi|pycparser|redis|hiredis|Jinja2|MarkupSafe|prometheus_client"
python3 -m pip freeze | grep -Ei "^($wanted)==" >"${TMPDIR:-/tmp}/wheels.$$"
platforms=$(for glibc in 17 24 26 27 28 31 34 35; do printf -- '--platform manylinux_2_%s_x86_64 ' "$glibc"; done)
# shellcheck disable=SC2086  # several words are meant
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${2:-3.12}" --implementation cp \
    $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" -r "${TMPDIR:-/tmp}/wheels.$$"
rm "${TMPDIR:-/tmp}/wheels.$$"
