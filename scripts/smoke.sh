#!/bin/sh
# Asks a running server one of everything with grpcurl, and says what failed and why.
#   scripts/smoke.sh HOST:PORT [grpcurl flags …]
# GRPCURL names the grpcurl to use. Plaintext, unless flags are given: -cacert ca.pem -H "authorization: Bearer …"
# TOKEN_FILE=PATH holds a token for all calls, which then stands in no list of processes.
# TIMEOUT=SECONDS is what each call may take, first token and all; 60 unless given.
# ADMIN=HOST:PORT asks the admin port as well, with the same flags, and HEALTH=HOST:PORT the health port, in plaintext.
# VERSION=X.Y.Z is what the server must be, as ADMIN says.
# DRAIN=yes takes the server out of service for a moment, through ADMIN, and back.
# Exit code: 0, or the number of checks that failed; 2 for a wrong call.
# shellcheck disable=SC2329  # functions that a trap or another function calls
set -u

wrong_call() {
    echo "smoke: $1" >&2
    exit 2
}

if [ $# -lt 1 ]; then
    echo "usage: $0 HOST:PORT [grpcurl flags ...]" >&2
    exit 2
fi
address=$1
shift
[ $# -gt 0 ] || set -- -plaintext
grpcurl=${GRPCURL:-grpcurl}
command -v "$grpcurl" >/dev/null 2>&1 || wrong_call "$grpcurl: not found; install grpcurl or set GRPCURL"
timeout=${TIMEOUT:-60}
case $timeout in
*[!0-9]* | 0) wrong_call "TIMEOUT=$timeout: whole seconds, please" ;;
esac
if [ -n "${TOKEN_FILE:-}" ]; then
    TOKEN=$(cat "$TOKEN_FILE") || wrong_call "TOKEN_FILE=$TOKEN_FILE: not readable"
    export TOKEN
    # shellcheck disable=SC2016  # grpcurl expands it
    set -- "$@" -expand-headers -H 'authorization: Bearer ${TOKEN}'
fi
[ -n "${ADMIN:-}" ] || [ -z "${VERSION:-}${DRAIN:-}" ] || wrong_call "VERSION and DRAIN need ADMIN=HOST:PORT"

service=whippet.v1.GenerationService
admin=whippet.v1.AdminService
work=$(mktemp -d) || exit 2
drained=
passed=0
failed=0

# clean FLAGS…: a server that this script has drained is not left so, whatever ends the script.
clean() {
    [ -z "$drained" ] || "$grpcurl" -max-time 10 -d '{}' "$@" "$ADMIN" "$admin/Undrain" >/dev/null 2>&1
    rm -rf "$work"
}
trap 'clean "$@"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ask REQUEST METHOD…: one call; leaves what came in $work/out and $work/err, and the exit code in $code. grpcurl exits
# with 64 + the gRPC code.
ask() {
    request=$1
    shift
    if [ -n "$request" ]; then
        "$grpcurl" -max-time "$timeout" -d "$request" "$@" >"$work/out" 2>"$work/err"
    else
        "$grpcurl" -max-time "$timeout" "$@" >"$work/out" 2>"$work/err"
    fi
    code=$?
}

# call NAME EXIT_CODE REQUEST METHOD…: one call of a check, which has failed where the exit code is another one.
call() {
    name=$1 wanted=$2
    shift 2
    ask "$@"
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

# token_ids: of one message or many, on one line, with commas.
token_ids() {
    tr -d ' _\n' <"$work/out" | tr '[:upper:]' '[:lower:]' | tr '{' '\n' |
        sed -n 's/.*"tokenids":\[\([0-9,]*\)\].*/\1/p' | paste -sd , -
}

# texts: of one message or many, in one piece, as JSON writes them.
texts() {
    sed -n 's/^ *"text": "\(.*\)",\{0,1\}$/\1/p' "$work/out" | tr -d '\n'
}

# says TEXT: that is the answer's text.
says() {
    said=$(texts)
    if [ "$said" != "$1" ]; then
        fail "another text: \"$said\" instead of \"$1\""
        return 1
    fi
}

# counts NUMBER: the answer has so many token ids, and says so.
counts() {
    has out "\"completion_tokens\": $1,?\$" || return 1
    came=$(token_ids | tr , '\n' | grep -c .)
    if [ "$came" -ne "$1" ]; then
        fail "$came token ids instead of $1"
        return 1
    fi
}

if call list 0 "" "$@" "$address" list; then
    if has out "^$service\$" '^whippet\.v1\.ModelService$' '^grpc\.health\.v1\.Health$'; then
        if grep -q "^$admin\$" "$work/out"; then fail "$admin is on the data port"; else pass; fi
    fi
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
model=$(sed -n 's/^ *"name": "\(.*\)",\{0,1\}$/\1/p' "$work/out" | head -n 1)
chats=$(grep -c '"chat": true' "$work/out")
# More tokens than a model's own limit, so that only time ends an answer.
room=$(sed -n 's/^ *"max_*[cC]ontext_*[tT]okens": \([0-9]*\).*$/\1/p' "$work/out" | head -n 1)
most=$((${room:-2} / 2))

# A text whose continuation is plain, so that no rounding decides on it; several pages of the prefix cache long.
numbers='one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, sixteen,'
question="\"text\": \"$numbers\", \"stopping\": {\"max_tokens\": 8, \"ignore_eos\": true}, \"output\": {\"token_ids\": true}"
seeded="$question, \"sampling\": {\"temperature\": 0.5, \"seed\": 7}"
greedy="$question, \"sampling\": {\"temperature\": 0}"
fresh='"cache": {"response": "CACHE_MODE_OFF", "semantic": "CACHE_MODE_OFF"}'

id=smoke-$$-$(date +%s)
call generate 0 "{\"request_id\": \"$id\", \"model\": \"$model\", $seeded, $fresh}" -v "$@" "$address" "$service/Generate" &&
    has out '"reason": "FINISH_REASON_LENGTH"' '"seed": "7"' "\"model\": \"$model\"" '"cache_source": "CACHE_SOURCE_NONE"' \
        "^x-request-id: $id\$" '^x-cache: ' && counts 8 && pass
first=$(texts)
call "the same seed gives the same text" 0 "{$seeded, $fresh}" "$@" "$address" "$service/Generate" && says "$first" && pass

call stream 0 "{$greedy, $fresh}" "$@" "$address" "$service/GenerateStream" &&
    has out '"prompt_info": \{' '"request_id": "' '"reason": "FINISH_REASON_LENGTH"' && counts 8 && {
    messages=$(grep -c '^{' "$work/out")
    if [ "$messages" -lt 2 ]; then
        fail "$messages message instead of a stream"
    elif [ "$(grep -Eic '"prompt_?info"' "$work/out")" -ne 1 ] || [ "$(grep -c '"finish"' "$work/out")" -ne 1 ]; then
        fail "prompt_info and finish do not come once each"
    else
        pass
    fi
}
streamed=$(texts)
call "caches give what was streamed" 0 "{$greedy}" "$@" "$address" "$service/Generate" && says "$streamed" &&
    call "caches give what was streamed" 0 "{$greedy}" "$@" "$address" "$service/Generate" && says "$streamed" && pass

endless="\"text\": \"$numbers\", \"stopping\": {\"ignore_eos\": true, \"max_tokens\": $most}"
call "a time budget ends an answer" 0 "{$endless, \"time_budget\": \"0.01s\", $fresh}" "$@" "$address" "$service/Generate" &&
    has out '"reason": "FINISH_REASON_TIME_BUDGET"' && pass

# A name is free again when its request has ended.
name="a caller who leaves is let go"
few='"delivery": {"max_tokens_per_message": 1024}'
ask "{\"request_id\": \"$id\", $endless, $few, $fresh}" -max-time 0.3 "$@" "$address" "$service/GenerateStream"
left=0
while :; do
    ask "{\"request_id\": \"$id\", \"text\": \"x\", \"stopping\": {\"max_tokens\": 1}}" "$@" "$address" "$service/Generate"
    if [ "$code" -ne 70 ] || [ "$left" -ge 5 ]; then break; fi
    left=$((left + 1))
    sleep 1
done
if [ "$code" -eq 0 ]; then pass; else fail "exit code $code instead of 0"; fi

if [ "$chats" -gt 0 ]; then
    call chat 0 '{"chat": {"messages": [{"role": "user", "content": "Hello"}]}, "stopping": {"max_tokens": 4}}' \
        "$@" "$address" "$service/Generate" && has out '"prompt_tokens": [1-9]' '"reason": "FINISH_REASON_' && pass
fi

text='Two dogs, and a third: h\u00e9!'
if call tokenize 0 "{\"text\": \"$text\"}" "$@" "$address" "$service/Tokenize"; then
    ids=$(token_ids)
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

# stranger COMMAND DROPPED FLAGS…: the command with the flags, but for those that DROPPED names and their values.
stranger() {
    command=$1 dropped=$2
    shift 2
    left=$#
    while [ "$left" -gt 0 ]; do
        word=$1
        shift
        left=$((left - 1))
        case " $dropped " in
        *" $word "*)
            shift
            left=$((left - 1))
            ;;
        *) set -- "$@" "$word" ;;
        esac
    done
    "$command" "$@"
}

without_token() {
    call "without a token nobody is served" 80 '{"text": "x"}' "$@" "$address" "$service/Generate" &&
        has err 'Unauthenticated' && pass
    [ -z "${ADMIN:-}" ] || {
        call "nor on the admin port" 80 '{}' "$@" "$ADMIN" "$admin/GetLoad" && has err 'Unauthenticated' && pass
    }
}
with_a_made_up_token() {
    call "nor with a token that nobody has" 80 '{"text": "x"}' -H 'authorization: Bearer nobody' "$@" \
        "$address" "$service/Generate" && has err 'Unauthenticated' && pass
}
without_certificate() {
    call "without a certificate nobody is connected" 1 "" "$@" "$address" list && pass
}

case " $* " in
*" -H authorization:"*)
    # A certificate may stand for a tenant by itself, but not beside a token.
    case " $* " in
    *" -cert "*) ;;
    *) stranger without_token -H "$@" ;;
    esac
    stranger with_a_made_up_token -H "$@"
    ;;
esac
case " $* " in
*" -cert "*) stranger without_certificate "-cert -key" "$@" ;;
esac
case " $* " in
*" -plaintext "*) ;;
*) call "plaintext is refused where TLS is spoken" 1 "" -plaintext -connect-timeout 3 "$address" list && pass ;;
esac

if [ -n "${HEALTH:-}" ]; then
    call "the health port" 0 "{\"service\": \"$service\"}" -plaintext "$HEALTH" grpc.health.v1.Health/Check &&
        has out '"status": "SERVING"' && pass
fi

if [ -n "${ADMIN:-}" ]; then
    call load 0 '{}' "$@" "$ADMIN" "$admin/GetLoad" &&
        has out '"state": "ENGINE_STATE_READY"' '"page_size": [1-9]' "\"version\": \"${VERSION:-.*}\"" && pass
    call optimizations 0 '{}' "$@" "$ADMIN" "$admin/ListOptimizations" && has out '"name": "batching"' && pass
fi
if [ "${DRAIN:-}" = yes ]; then
    drained=yes
    if call "a drain" 0 "{\"timeout\": \"${timeout}s\"}" -max-time $((timeout + 10)) "$@" "$ADMIN" "$admin/Drain"; then
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
    call "back in service" 0 '{}' "$@" "$ADMIN" "$admin/Undrain" && drained= &&
        call "back in service" 0 '{"text": "x", "stopping": {"max_tokens": 1}}' "$@" "$address" "$service/Generate" &&
        has out '"prompt_tokens": [1-9]' &&
        call "back in service" 0 "{\"service\": \"$service\"}" "$@" "$address" grpc.health.v1.Health/Check &&
        has out '"status": "SERVING"' && pass
fi

echo "smoke: $passed passed, $failed failed against $address"
exit "$failed"
