#!/bin/sh
# Starts a server on free ports, runs smoke.sh against it, and stops it again.
#   scripts/smoke-local.sh [whippet serve flags …]        default: --model models/demo-awq
# WHIPPET and GRPCURL name the two commands. Exit code: smoke.sh's, or 2 where the server does not start or stop well.
# shellcheck disable=SC2329  # a trap calls it
set -u

here=$(dirname "$0")
whippet=${WHIPPET:-whippet}
[ $# -gt 0 ] || set -- --model "$here/../models/demo-awq"
work=$(mktemp -d) || exit 2
server=

clean() {
    [ -z "$server" ] || kill "$server" 2>/dev/null
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 2' INT TERM

: >"$work/out"
"$whippet" serve "$@" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --health-listen 127.0.0.1:0 \
    --metrics-listen 127.0.0.1:0 >"$work/out" 2>"$work/err" &
server=$!

waited=0
until grep -q '^ready: ' "$work/out"; do
    if ! kill -0 "$server" 2>/dev/null || [ "$waited" -ge "${SMOKE_WAIT:-120}" ]; then
        echo "smoke: the server did not become ready within $waited s" >&2
        sed 's/^/     | /' "$work/err" >&2
        exit 2
    fi
    sleep 1
    waited=$((waited + 1))
done
address=$(sed -n 's/^ready: data \([^ ]*\).*/\1/p' "$work/out")
ADMIN=$(sed -n 's/^ready: .* admin \([^ ]*\).*/\1/p' "$work/out")
HEALTH=$(sed -n 's/^ready: .* health \([^ ]*\).*/\1/p' "$work/out")

DRAIN=yes ADMIN=$ADMIN HEALTH=$HEALTH "$here/smoke.sh" "$address"
result=$?

kill "$server"
wait "$server"
stopped=$?
server=
if [ "$stopped" -ne 0 ]; then
    echo "smoke: the server ended with exit code $stopped" >&2
    sed 's/^/     | /' "$work/err" >&2
    [ "$result" -ne 0 ] || result=2
fi
exit "$result"
