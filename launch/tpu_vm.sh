#!/usr/bin/env bash
# Starts, watches, resumes and deletes a run on a TPU VM slice of any number of hosts, through queued resources.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
launch/tpu_vm.sh VERB --name NAME --zone ZONE [flags] [-- COMMAND]

  create   ask for a slice (a queued resource); returns while it is queued
  start    wait for the slice, then mount, install and start COMMAND on every host
  watch    create and start what is missing; after a preemption do it all again; returns when COMMAND has ended
  resume   as watch, but returns once COMMAND runs
  status   the slice's state, and a line per host
  logs     follow the log of host 0
  stop     end COMMAND on every host (it saves first); the slice stays and costs
  delete   delete the slice

  --name NAME             of the slice, and of its queued resource
  --zone ZONE             e.g. us-east5-a
  --project PROJECT       (gcloud's default)
  --accelerator TYPE      v4-32, v5litepod-64 (or v5e-64), v5p-128, v6e-16, ...
  --capacity KIND         on-demand (default), spot, reserved
  --bucket BUCKET         mounted on every host at --mount; data, config, package and output lie there
  --mount PATH            (/mnt/marsjax)
  --package WHEEL         the wheel to install, a path in the mounted bucket; or a pip requirement (marsjax[tpu,data])
  --constraints FILE      versions for it: a path in the mounted bucket
  --service-account MAIL  of the machines (the project's default one)
  --network NAME          (default)
  --runtime VERSION       image of the machines (that of the TPU's generation)
  --env NAME=VALUE        for COMMAND; may be repeated; it is visible to others, so no secrets
  --poll SECONDS          between two looks (60)
  --recreate N            slices to ask for again before giving up (100)
  --restarts N            starts again on a slice that is still there (10)
  --dry-run               print every command, run none

COMMAND is the same on all hosts, e.g. marsjax train /mnt/marsjax/config.yaml output.directory=/mnt/marsjax/runs/a
TEXT
}

PACKAGE="marsjax[tpu,data]" CONSTRAINTS="" SERVICE_ACCOUNT="" NETWORK="" RUNTIME="" RECREATE=100 RESTARTS=10

VERB=${1:-}
case $VERB in
    create | start | watch | resume | status | logs | stop | delete) shift ;;
    -h | --help | help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        die "the first word must be a verb, got '$VERB'"
        ;;
esac
parse "--name --zone --project --accelerator --capacity --bucket --mount --package --constraints --service-account \
--network --runtime --poll --recreate --restarts" "$@"

require --name --zone
check_name --name "$NAME" 60
check_zone
check_project
check_count --poll "$POLL" 0
check_count --recreate "$RECREATE" 0
check_count --restarts "$RESTARTS" 0
if [[ " create watch resume " == *" $VERB "* ]]; then
    require --accelerator
    check_accelerator
    case $CAPACITY in on-demand | spot | reserved) ;; *) die "--capacity $CAPACITY is none of on-demand, spot, reserved" ;; esac
    if [[ -z $RUNTIME ]]; then
        case $GENERATION in
            v4) RUNTIME=tpu-ubuntu2204-base ;;
            v5p) RUNTIME=v2-alpha-tpuv5 ;;
            v5litepod) RUNTIME=v2-alpha-tpuv5-lite ;;
            v6e) RUNTIME=v2-alpha-tpuv6e ;;
        esac
    fi
fi
if [[ " start watch resume " == *" $VERB "* ]]; then
    require --bucket
    check_bucket
    check_command
fi

WHERE=("--zone=$ZONE")
[[ -z $PROJECT ]] || WHERE+=("--project=$PROJECT")

# --- the slice ------------------------------------------------------------------------------------------------------

# The zone may not offer this type: asked once, since a request for it would only fail later.
check_offer() {
    say "$ACCELERATOR is $CHIPS chips, $CAPACITY"
    run gcloud compute tpus accelerator-types describe "$ACCELERATOR" "${WHERE[@]}" '--format=value(type)' ||
        die "$ACCELERATOR is not offered in $ZONE to this project; see: gcloud compute tpus accelerator-types list $(quoted "${WHERE[@]}")"
}

create() {
    local words=(gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${WHERE[@]}"
        "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME"
        --scopes=https://www.googleapis.com/auth/cloud-platform)
    [[ $CAPACITY != spot ]] || words+=(--spot)
    [[ $CAPACITY != reserved ]] || words+=(--reserved)
    [[ -z $SERVICE_ACCOUNT ]] || words+=("--service-account=$SERVICE_ACCOUNT")
    [[ -z $NETWORK ]] || words+=("--network=$NETWORK")
    run "${words[@]}"
}

# --force: also the nodes. A request that was suspended or failed keeps its place in the quota until it is deleted.
delete() { run gcloud compute tpus queued-resources delete "$NAME" "${WHERE[@]}" --force --quiet; }

describe_request() { run gcloud compute tpus queued-resources describe "$NAME" "${WHERE[@]}" '--format=value(state.state)'; }
describe_node() { run gcloud compute tpus tpu-vm describe "$NAME" "${WHERE[@]}" '--format=value(state)'; }

# Prints the state that a describe function reports; ABSENT if there is no such thing, UNKNOWN if there was no answer.
state_of() {
    local errors state
    errors=$(mktemp)
    if state=$("$1" 2>"$errors"); then
        printf '%s' "${state:-UNKNOWN}"
    elif grep -qiE 'not.?found|does not exist' "$errors"; then
        printf ABSENT
    else
        say "$(tail -n 1 "$errors")"
        printf UNKNOWN
    fi
    rm -f "$errors"
}

# ABSENT, READY, GONE (preempted, failed, suspended: to be deleted and asked for again), or a state to wait in.
slice_state() {
    local state node
    state=$(state_of describe_request)
    case $state in
        ACTIVE)
            node=$(state_of describe_node)
            case $node in
                READY) printf READY ;;
                # A preempted node is seen before its request is suspended.
                PREEMPTED | TERMINATED | ABSENT) printf GONE ;;
                *) printf '%s' "$node" ;;
            esac
            ;;
        SUSPENDED | FAILED) printf GONE ;;
        *) printf '%s' "$state" ;;
    esac
}

# --- the run on its hosts -------------------------------------------------------------------------------------------

on() { run gcloud compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" "--worker=$1" --quiet "--command=$2"; }
everywhere() { on all "$1"; }

# Metadata is not cached: a host must see at once what another has written.
mount_line() {
    cat <<LINE | tr '\n' ' '
set -e; mountpoint -q $MOUNT && exit 0;
if ! command -v gcsfuse >/dev/null; then
curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null;
echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt gcsfuse-\$(lsb_release -cs) main" |
sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null;
for attempt in 1 2 3 4 5 6; do
sudo apt-get update -qq && sudo apt-get install -y -qq -o DPkg::Lock::Timeout=300 gcsfuse && break; sleep 20;
done;
fi;
sudo mkdir -p $MOUNT; sudo chown "\$USER" $MOUNT;
gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 $BUCKET $MOUNT
LINE
}

# uv brings a Python that is new enough; the images' own is 3.10.
install_line() {
    local requirement=$PACKAGE constraints=""
    [[ $PACKAGE != /* ]] || requirement="marsjax[tpu,data] @ file://$PACKAGE"
    [[ -z $CONSTRAINTS ]] || constraints=" --constraints $(quote "$CONSTRAINTS")"
    cat <<LINE | tr '\n' ' '
set -e; cd; python3 -m pip install --user -q uv;
[ -x marsjax-env/bin/python ] || ~/.local/bin/uv venv -q --python 3.11 marsjax-env;
~/.local/bin/uv pip install -q --python marsjax-env/bin/python$constraints $(quote "$requirement")
LINE
}

# A session of its own, so that it outlives the connection and can be ended whole. JAX finds the slice's hosts itself.
start_line() {
    local inner
    # The trap keeps this shell alive through SIGTERM, to write the exit code down; it does not reach COMMAND.
    inner="trap : TERM; echo \$\$ >pid; $(quoted env MARSJAX_COORDINATOR=auto PYTHONUNBUFFERED=1 "${ENVIRONMENT[@]}" "${COMMAND[@]}"); echo \$? >exit"
    cat <<LINE | tr '\n' ' '
set -e; mkdir -p ~/marsjax-run; cd ~/marsjax-run;
if [ -e pid ] && [ ! -e exit ] && kill -0 "\$(cat pid)" 2>/dev/null; then echo "marsjax-status running"; exit 0; fi;
rm -f pid exit; export PATH="\$HOME/marsjax-env/bin:\$PATH";
setsid nohup bash -c $(quote "$inner") >>log 2>&1 </dev/null &
for tenth in \$(seq 100); do [ -e pid ] && exit 0; sleep 0.1; done; echo "it did not start" >&2; exit 1
LINE
}

status_line() {
    cat <<'LINE' | tr '\n' ' '
cd ~/marsjax-run 2>/dev/null || { echo "marsjax-status none"; exit 0; };
if [ -s exit ]; then echo "marsjax-status exit $(cat exit)";
elif [ -e pid ] && kill -0 "$(cat pid)" 2>/dev/null; then echo "marsjax-status running";
else echo "marsjax-status gone"; fi
LINE
}

# SIGTERM makes the trainer save and end; what does not is killed, since it would keep the chips.
stop_line() {
    cat <<'LINE' | tr '\n' ' '
cd ~/marsjax-run 2>/dev/null && [ -e pid ] || exit 0; group=$(cat pid);
kill -TERM -- "-$group" 2>/dev/null || exit 0;
for second in $(seq 180); do kill -0 -- "-$group" 2>/dev/null || exit 0; sleep 1; done;
kill -KILL -- "-$group" 2>/dev/null || true
LINE
}

set_up() {
    everywhere "$(mount_line)" && everywhere "$(install_line)" && everywhere "$(start_line)"
}

# Prints what the hosts' lines come to: done, failed CODE, broken WHY (to be started again), running, unknown.
#
# 127 and above, and 42: the machine, a signal or what the trainer says another start may mend; 1 to 126 said what is
# wrong. When a host is lost, the others end too, some with a code that blames what they saw of it: one host that another
# start may help outweighs them.
run_state() {
    local lines codes code mended="" final=""
    if ! lines=$(everywhere "$(status_line)" 2>/dev/null | grep -o 'marsjax-status .*') || [[ -z $lines ]]; then
        printf unknown
        return
    fi
    codes=$(sed -nE 's/^marsjax-status exit ([0-9]+)$/\1/p' <<<"$lines")
    for code in $codes; do
        if ((code == 42 || code >= 127)); then
            mended=${mended:-$code}
        elif ((code != 0)); then
            final=${final:-$code}
        fi
    done
    if [[ -n $mended ]]; then
        printf 'broken exit code %s' "$mended"
    elif grep -qE 'gone|none' <<<"$lines"; then
        printf 'broken not running on every host'
    elif [[ -n $final ]]; then
        printf 'failed %s' "$final"
    elif grep -q running <<<"$lines"; then
        printf running
    else
        printf 'done'
    fi
}

# --- verbs ----------------------------------------------------------------------------------------------------------

# keep_going once|always: brings slice and run up, as often as needed; with once until it runs, else until it has ended.
keep_going() {
    local recreated=0 restarted=0 fresh=false sure=false state last="" last_run=""
    while :; do
        state=$(slice_state)
        [[ $state == "$last" ]] || say "slice $NAME: $state"
        last=$state
        case $state in
            ABSENT | GONE)
                ((recreated <= RECREATE)) || die "$NAME was asked for $recreated times; --recreate $RECREATE is the limit"
                [[ $state == ABSENT ]] || delete || say "it cannot be deleted yet"
                if [[ $(slice_state) == ABSENT ]]; then
                    ((recreated)) || check_offer
                    create || say "the request was refused"
                    recreated=$((recreated + 1)) restarted=0 fresh=true
                fi
                ;;
            READY)
                state=$(run_state)
                [[ $state == "$last_run" ]] || say "run on $NAME: $state"
                last_run=$state
                [[ $state == failed* ]] || sure=false
                case $state in
                    running) [[ $1 == always ]] || return 0 ;;
                    done) return 0 ;;
                    failed*)
                        # Looked at once more: hosts are asked one after another, and one may have been lost since.
                        if ! $sure; then
                            sure=true
                            pause
                            continue
                        fi
                        on 0 'tail -n 40 ~/marsjax-run/log' || true
                        say "the run ended with exit code ${state#failed }; the reason is above. The slice is still there"
                        return 1
                        ;;
                    broken*)
                        if $fresh; then
                            fresh=false
                        else
                            restarted=$((restarted + 1))
                            if ((restarted > RESTARTS)); then
                                on 0 'tail -n 40 ~/marsjax-run/log' || true
                                die "started again $RESTARTS times (--restarts); the end of a log is above, more: logs"
                            fi
                            everywhere "$(stop_line)" || say "not every host could be stopped"
                        fi
                        set_up || say "not every host could be started"
                        ;;
                esac
                ;;
        esac
        pause
    done
}

case $VERB in
    create)
        check_offer
        create
        ;;
    delete) delete ;;
    stop) everywhere "$(stop_line)" ;;
    logs) on 0 'tail -n 100 -F ~/marsjax-run/log' ;;
    status)
        describe_request
        describe_node
        everywhere "$(status_line)"
        ;;
    start)
        if $DRY_RUN; then
            describe_request
            describe_node
        else
            until state=$(slice_state) && [[ $state == READY ]]; do
                [[ $state != ABSENT && $state != GONE ]] || die "slice $NAME is $state: create it first, or use resume"
                say "slice $NAME: $state"
                pause
            done
        fi
        set_up
        ;;
    watch | resume)
        if $DRY_RUN; then
            echo "# every $POLL s:"
            describe_request
            describe_node
            everywhere "$(status_line)"
            echo "# if the slice is preempted, suspended or failed:"
            delete
            echo "# then, or if there is none (the first of the two only once):"
            check_offer
            create
            echo "# if the run ended on a slice that is still there:"
            everywhere "$(stop_line)"
            echo "# then, and on a new slice:"
            set_up
        elif [[ $VERB == watch ]]; then
            keep_going always
        else
            keep_going once
        fi
        ;;
esac
