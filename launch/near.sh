#!/usr/bin/env bash
# near.sh FROM TO COMMAND ...: copies the directory FROM to TO on the machine's own disk, once, and becomes COMMAND.
#
# Training reads rows one by one in random order. From a mounted bucket each costs a request over the network, which
# takes longer than the step; copying all of them in order takes seconds.
set -euo pipefail

(($# >= 3)) || {
    echo "near.sh: needs FROM TO COMMAND ..., got $# words" >&2
    exit 2
}
from=$1 to=$2
shift 2
if [[ ! -d $to ]]; then
    [[ -d $from ]] || {
        echo "near.sh: no such directory: $from" >&2
        exit 2
    }
    # Renamed when it is whole: a start that is interrupted leaves nothing that the next one takes for the rows.
    rm -rf "$to.part"
    if ! { mkdir -p "$(dirname "$to")" && cp -r "$from" "$to.part" && mv "$to.part" "$to"; }; then
        echo "near.sh: $from could not be copied to $to" >&2
        exit 42 # a network's error: another start may mend it
    fi
fi
exec "$@"
