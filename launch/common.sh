# shellcheck shell=bash disable=SC2034
# What tpu_vm.sh and gke.sh share: flags, checks before the first call, and commands that can be printed instead.

# Flags that take a value, and what they are if not given.
NAME="" ZONE="" PROJECT="" ACCELERATOR="" CAPACITY="on-demand" BUCKET="" MOUNT="/mnt/marsjax"
POLL=60
DRY_RUN=false
ENVIRONMENT=()
COMMAND=()

say() { printf 'launch: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 2
}

# One word as bash would have to read it; of --flag=value and name=value only the value is quoted.
quote() {
    if [[ $1 =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
        printf '%s' "$1"
    elif [[ $1 =~ ^([A-Za-z_-][A-Za-z0-9_.-]*=)(.+)$ ]]; then
        printf '%s%s' "${BASH_REMATCH[1]}" "$(quote "${BASH_REMATCH[2]}")"
    else
        printf "'%s'" "${1//\'/\'\\\'\'}"
    fi
}

quoted() {
    local word line=""
    for word in "$@"; do line+="${line:+ }$(quote "$word")"; done
    printf '%s' "$line"
}

# Runs a command, or prints it.
run() {
    if $DRY_RUN; then
        printf '%s\n' "$(quoted "$@")"
    else
        "$@"
    fi
}

pause() { $DRY_RUN || sleep "$POLL"; }

# parse "FLAG FLAG ..." "$@": sets FLAG (--service-account sets SERVICE_ACCOUNT) and, behind --, COMMAND.
parse() {
    local allowed=" $1 --env --dry-run " flag variable
    shift
    while (($#)); do
        flag=${1%%=*}
        if [[ $1 == -- ]]; then
            shift
            COMMAND=("$@")
            return
        fi
        [[ $flag == --* ]] || die "unexpected '$1': flags come as --name VALUE, the command behind --"
        [[ $allowed == *" $flag "* ]] || die "unknown flag $flag; known:$allowed"
        if [[ $flag == --dry-run ]]; then
            DRY_RUN=true
            shift
            continue
        fi
        local value
        if [[ $1 == *=* ]]; then
            value=${1#*=}
            shift
        else
            (($# > 1)) || die "$flag needs a value"
            value=$2
            shift 2
        fi
        [[ -n $value ]] || die "$flag needs a value"
        if [[ $flag == --env ]]; then
            [[ $value =~ ^[A-Za-z_][A-Za-z0-9_]*=.*$ ]] || die "--env $value must be NAME=VALUE"
            ENVIRONMENT+=("$value")
        else
            variable=${flag#--}
            variable=${variable//-/_}
            printf -v "${variable^^}" '%s' "$value"
        fi
    done
}

require() {
    local flag variable
    for flag in "$@"; do
        variable=${flag#--}
        variable=${variable//-/_}
        variable=${variable^^}
        [[ -n ${!variable} ]] || die "$flag is missing"
    done
}

# Names of machines, clusters and workloads, which become host names.
check_name() {
    local most=$3
    [[ $2 =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ && ${#2} -le $most ]] ||
        die "$1 $2 must be lower-case letters, digits and hyphens, begin with a letter, and have at most $most characters"
}

check_zone() {
    [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z][a-z0-9]*$ ]] ||
        die "--zone $ZONE is no zone, such as us-central2-b or europe-west4-a (a region and a letter)"
}

check_project() {
    [[ -z $PROJECT || $PROJECT =~ ^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$ ]] ||
        die "--project $PROJECT is no project id (6 to 30 lower-case letters, digits and hyphens)"
}

check_count() {
    [[ $2 =~ ^[0-9]+$ && $((10#$2)) -ge $3 ]] || die "$1 $2 must be a whole number of at least $3"
}

# Sets ACCELERATOR to the name that Google Cloud uses, GENERATION, and CHIPS (of one slice).
check_accelerator() {
    local size unit
    [[ $ACCELERATOR =~ ^v5e-[0-9]+$ ]] && ACCELERATOR="v5litepod-${ACCELERATOR#v5e-}"
    [[ $ACCELERATOR =~ ^(v4|v5p|v5litepod|v6e)-([1-9][0-9]*)$ ]] ||
        die "--accelerator $ACCELERATOR is none of v4-N, v5p-N (N TensorCores), v5litepod-N, v6e-N (N chips)"
    GENERATION=${BASH_REMATCH[1]} size=${BASH_REMATCH[2]}
    case $GENERATION in
        v4 | v5p)
            # Two TensorCores a chip, four chips a machine, 64 chips a cube.
            [[ " 8 16 32 64 " == *" $size "* ]] || ((size % 128 == 0)) ||
                die "--accelerator $ACCELERATOR: $GENERATION comes with 8, 16, 32, 64 or a multiple of 128 TensorCores"
            unit=2
            ;;
        *)
            [[ " 1 4 8 16 32 64 128 256 " == *" $size "* ]] ||
                die "--accelerator $ACCELERATOR: $GENERATION comes with 1, 4, 8, 16, 32, 64, 128 or 256 chips"
            unit=1
            ;;
    esac
    CHIPS=$((size / unit))
}

check_bucket() {
    BUCKET=${BUCKET#gs://}
    BUCKET=${BUCKET%/}
    [[ $BUCKET =~ ^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$ ]] ||
        die "--bucket $BUCKET is no bucket's name (no folder, 3 to 63 lower-case letters, digits, hyphens)"
    [[ $MOUNT =~ ^/[A-Za-z0-9_./-]+[A-Za-z0-9_-]$ ]] || die "--mount $MOUNT must be an absolute path, such as /mnt/marsjax"
}

# What is written elsewhere goes with the machine.
check_command() {
    ((${#COMMAND[@]})) || die "the command is missing: put it behind --, e.g. -- marsjax train $MOUNT/config.yaml"
    local word output=""
    for word in "${COMMAND[@]}"; do
        [[ $word != *$'\n'* ]] || die "the command must be one line"
        [[ $word == output.directory=* ]] && output=${word#output.directory=}
    done
    if [[ ${COMMAND[*]} == *"marsjax train "* && $output != "$MOUNT"/?* ]]; then
        die "output.directory=$output must be given in the command and lie in the mounted bucket, as" \
            "output.directory=$MOUNT/runs/NAME: a machine's own disk is lost with it, and the run could not go on"
    fi
}
