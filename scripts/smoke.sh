#!/bin/sh
# Asks a running server one of everything with grpcurl, and says what failed and why.
#   scripts/smoke.sh HOST:PORT [grpcurl flags …]
# GRPCURL names the grpcurl to use. Plaintext, unless flags are given: -cacert ca.pem -H "authorization: Bearer …"
# ADMIN=HOST:PORT asks the admin port as well, with the same flags, and HEALTH=HOST:PORT the health port, in plaintext.
# DRAIN=yes takes the server out of service for a moment, through ADMIN, and back.
# Exit code: 0, or the number of checks that failed; 2 for a wrong call.
set -u

if [ $# -lt 1 ]; then
    echo "usage: $0 HOST:PORT [grpcurl flags ...]" >&2
    exit 2
fi
address=$1
shift
[ $# -gt 0 ] || set -- -plaintext
grpcurl=${GRPCURL:-grpcurl}
if ! command -v "$grpcurl" >/dev/null 2>&1; then
    echo "smoke: $grpcurl: not found; install grpcurl or set GRPCURL" >&2
    exit 2
fi

service=whippet.v1.GenerationService
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

# call NAME EXIT_CODE REQUEST METHOD…: one call; leaves what came in $work/out. grpcurl exits with 64 + the gRPC code.
call() {
    name=$1 wanted=$2 request=$3
    shift 3
    if [ -n "$request" ]; then
        "$grpcurl" -max-time 60 -d "$request" "$@" >"$work/out" 2>"$work/err"
    else
        "$grpcurl" -max-time 60 "$@" >"$work/out" 2>"$work/err"
    fi
    code=$?
    if [ "$code" -ne "$wanted" ]; then
        fail "exit code $code instead of $wanted"
        return 1
    fi
}

fail() {
    failed=$((failed + 1))
    echo "FAIL $name: $1"
    sed 's/^/     | /' "$work/err" "$work/out" | head -n 12
}

pass() {
    passed=$((passed + 1))
    echo "ok   $name"
}

# has FILE PATTERN…: every pattern (grep -Ei) is in what came. Newer grpcurl says promptInfo, older prompt_info.
has() {
    file=$1
    shift
    for pattern in "$@"; do
        if ! grep -Eiq -- "$(echo "$pattern" | sed 's/_/_?/g')" "$work/$file"; then
            fail "no /$pattern/ in its answer"
            return 1
        fi
    done
}

# numbers KEY: the JSON array of numbers of that key, on one line.
numbers() {
    tr -d ' _\n' <"$work/out" | tr '[:upper:]' '[:lower:]' | sed -n "s/.*\"$1\":\[\([0-9,]*\)\].*/\1/p"
}

if call list 0 "" "$@" "$address" list; then
    has out "^$service\$" '^whippet\.v1\.ModelService$' '^grpc\.health\.v1\.Health$' && pass
else
    echo "smoke: $address does not answer; nothing else was tried"
    exit 1
fi

call describe 0 "" "$@" "$address" describe "$service" &&
    has out 'rpc Generate ' 'rpc GenerateStream .*stream' 'rpc Tokenize ' 'rpc Detokenize ' && pass

call health 0 "{\"service\": \"$service\"}" "$@" "$address" grpc.health.v1.Health/Check &&
    has out '"status": "SERVING"' && pass

call "health of the process" 0 '{}' "$@" "$address" grpc.health.v1.Health/Check && has out '"status": "SERVING"' && pass

call models 0 '{}' "$@" "$address" whippet.v1.ModelService/ListModels &&
    has out '"name": "' '"vocab_size": [1-9]' '"max_context_tokens": [1-9]' '"tokenizer_digest": "[0-9a-f]{64}"' && pass

call generate 0 '{"text": "def", "stopping": {"max_tokens": 8, "ignore_eos": true}, "sampling": {"seed": 7}}' \
    "$@" "$address" "$service/Generate" &&
    has out '"text": "' '"reason": "FINISH_REASON_LENGTH"' '"completion_tokens": 8' '"seed": "7"' && pass

call stream 0 '{"text": "def", "stopping": {"max_tokens": 8, "ignore_eos": true}, "output": {"token_ids": true}}' \
    "$@" "$address" "$service/GenerateStream" &&
    has out '"prompt_info": \{' '"request_id": "' '"reason": "FINISH_REASON_LENGTH"' && {
    messages=$(grep -c '^{' "$work/out")
    if [ "$messages" -lt 2 ]; then
        fail "$messages message instead of a stream"
    elif [ "$(grep -Eic '"prompt_?info"' "$work/out")" -ne 1 ] || [ "$(grep -c '"finish"' "$work/out")" -ne 1 ]; then
        fail "prompt_info and finish do not come once each"
    else
        pass
    fi
}

call chat 0 '{"chat": {"messages": [{"role": "user", "content": "Hello"}]}, "stopping": {"max_tokens": 4}}' \
    "$@" "$address" "$service/Generate" && has out '"prompt_tokens": [1-9]' '"reason": "FINISH_REASON_' && pass

text='Two dogs, and a third: h\u00e9!'
if call tokenize 0 "{\"text\": \"$text\"}" "$@" "$address" "$service/Tokenize"; then
    ids=$(numbers tokenids)
    if [ -z "$ids" ]; then
        fail "no token ids"
    else
        pass
        call "detokenize gives the text back" 0 "{\"token_ids\": [$ids]}" "$@" "$address" "$service/Detokenize" &&
            has out '"text": "Two dogs, and a third: hé!"' && pass
    fi
fi

call "an invalid request is refused field by field" 67 \
    '{"text": "x", "sampling": {"temperature": -1, "top_p": 2}}' "$@" "$address" "$service/Generate" &&
    has err 'InvalidArgument' 'sampling\.temperature' 'sampling\.top_p' && pass

call "an unknown model is not found" 69 '{"model": "no such model", "text": "x"}' "$@" "$address" "$service/Generate" &&
    has err 'NotFound' && pass

# refused_tokens FLAGS…: none, and one that nobody has, in place of the flags' own.
refused_tokens() {
    left=$#
    while [ "$left" -gt 0 ]; do
        flag=$1
        shift
        left=$((left - 1))
        if [ "$flag" = -H ]; then
            shift
            left=$((left - 1))
        else
            set -- "$@" "$flag"
        fi
    done
    call "without a token nobody is served" 80 '{"text": "x"}' "$@" "$address" "$service/Generate" &&
        has err 'Unauthenticated' && pass
    call "nor with a token that nobody has" 80 '{"text": "x"}' -H 'authorization: Bearer nobody' "$@" \
        "$address" "$service/Generate" && has err 'Unauthenticated' && pass
}
case " $* " in *" -H authorization:"*) refused_tokens "$@" ;; esac

case " $* " in
*" -plaintext "*) ;;
*) call "plaintext is refused where TLS is spoken" 1 "" -plaintext -connect-timeout 3 "$address" list && pass ;;
esac

if [ -n "${HEALTH:-}" ]; then
    call "the health port" 0 "{\"service\": \"$service\"}" -plaintext "$HEALTH" grpc.health.v1.Health/Check &&
        has out '"status": "SERVING"' && pass
fi

admin=whippet.v1.AdminService
if [ -n "${ADMIN:-}" ]; then
    call load 0 '{}' "$@" "$ADMIN" "$admin/GetLoad" &&
        has out '"state": "ENGINE_STATE_READY"' '"page_size": [1-9]' && pass
    call optimizations 0 '{}' "$@" "$ADMIN" "$admin/ListOptimizations" && has out '"name": "batching"' && pass
fi
if [ -n "${ADMIN:-}" ] && [ "${DRAIN:-}" = yes ]; then
    if call "a drain" 0 '{"timeout": "50s"}' "$@" "$ADMIN" "$admin/Drain"; then
        if grep -Eq 'remaining|admitting' "$work/out"; then
            fail "not drained"
        else
            pass
        fi
    fi
    call "health of a drained server" 0 "{\"service\": \"$service\"}" "$@" "$address" grpc.health.v1.Health/Check &&
        has out '"status": "NOT_SERVING"' && pass
    call "a drained server refuses" 78 '{"text": "x"}' "$@" "$address" "$service/Generate" &&
        has err 'Unavailable' 'draining' && pass
    call "back in service" 0 '{}' "$@" "$ADMIN" "$admin/Undrain" &&
        call "back in service" 0 '{"text": "x", "stopping": {"max_tokens": 1}}' "$@" "$address" "$service/Generate" &&
        has out '"prompt_tokens": [1-9]' && pass
fi

echo "smoke: $passed passed, $failed failed against $address"
exit "$failed"
