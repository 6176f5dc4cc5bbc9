#!/usr/bin/env bash
# both.sh ARGUMENTS…: pytest with these arguments on armhf and arm64, emulated side by side. Exit status 69: cannot be done here.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=$(mktemp -d)
declare -A pids
# By SIGKILL: unshare passes nothing else on to the process in its namespace.
end() { kill -KILL "${pids[@]}" 2>/dev/null; rm -rf "$logs"; }
trap end EXIT
trap 'exit 143' TERM INT
for architecture in armhf arm64; do
    "$here/run.sh" $architecture python3 -m pytest -q -p no:cacheprovider "$@" > "$logs/$architecture" 2>&1 &
    pids[$architecture]=$!
done
worst=0
for architecture in armhf arm64; do
    status=0; wait "${pids[$architecture]}" || status=$?
    echo "--- $architecture"
    # All of a failure; of a success what was skipped and the count.
    if [ $status = 0 ]; then grep -E '^SKIPPED|passed' "$logs/$architecture"; else cat "$logs/$architecture"; fi
    [ $status -le $worst ] || worst=$status
done
pids=()
exit $worst
