#!/bin/sh
# Asks a running server one of everything with grpcurl, and says what failed and why.
#   scripts/smoke.sh HOST:PORT [grpcurl flags …]
# GRPCURL names the grpcurl to use. Plaintext, unless flags are given: -cacert ca.pem -H "authorization: Bearer …"
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

echo "smoke: $passed passed, $failed failed against $address"
exit "$failed"
