#!/usr/bin/env bash
# Starts, watches, resumes and deletes a run on GKE: a JobSet on one or several TPU slices, through xpk.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
launch/gke.sh VERB --cluster CLUSTER --zone ZONE [flags] [-- COMMAND]

  cluster         create the cluster with its slices and mount the bucket in all of its workloads
  image           build launch/Dockerfile and push it
  start           submit COMMAND as the workload NAME
  watch           wait for its end; after --recreate failures of the whole JobSet give up
  resume          submit it again, in place of what is left of the last one
  status          its state
  logs            follow the log of the first host
  delete          delete the workload
  delete-cluster  delete the cluster and its slices

  --cluster CLUSTER       the cluster's name
  --name NAME             the workload's
  --zone ZONE             e.g. us-east5-a
  --project PROJECT       (gcloud's default)
  --accelerator TYPE      of one slice: v4-32, v5litepod-64 (or v5e-64), v5p-128, v6e-16, ...
  --slices N              (1)
  --capacity KIND         of the cluster: on-demand (default), spot, or reserved with --reservation
  --reservation NAME      the reservation to take the slices from
  --bucket BUCKET         mounted at --mount; data, config and output lie there
  --mount PATH            (/mnt/marsjax)
  --image IMAGE           e.g. us-docker.pkg.dev/PROJECT/marsjax/marsjax:1
  --restarts N            restarts by JobSet, within one workload (100)
  --recreate N            workloads to submit again when watch sees one fail (0)
  --env NAME=VALUE        for COMMAND; may be repeated; it is visible to others, so no secrets
  --poll SECONDS          between two looks (60)
  --dry-run               print every command, run none

COMMAND is the same on all hosts, e.g. marsjax train /mnt/marsjax/config.yaml output.directory=/mnt/marsjax/runs/a
TEXT
}

CLUSTER="" SLICES=1 RESERVATION="" IMAGE="" RESTARTS=100 RECREATE=0

VERB=${1:-}
case $VERB in
    cluster | image | start | watch | resume | status | logs | delete | delete-cluster) shift ;;
    -h | --help | help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        die "the first word must be a verb, got '$VERB'"
        ;;
esac
parse "--cluster --name --zone --project --accelerator --slices --capacity --reservation --bucket --mount --image \
--restarts --recreate --poll" "$@"

check_project
check_count --slices "$SLICES" 1
check_count --restarts "$RESTARTS" 0
check_count --recreate "$RECREATE" 0
check_count --poll "$POLL" 1
if [[ $VERB == image ]]; then
    require --image
else
    require --cluster --zone
    check_name --cluster "$CLUSTER" 40
    check_zone
    case $VERB in
        cluster | delete-cluster) ;;
        *)
            require --name
            check_name --name "$NAME" 40 # JobSet adds to it, up to the 63 characters of a host name
            ;;
    esac
fi
if [[ " cluster start watch resume " == *" $VERB "* ]]; then
    require --accelerator
    check_accelerator
fi
if [[ $VERB == cluster ]]; then
    require --bucket
    check_bucket
    case $CAPACITY in
        on-demand | spot) [[ -z $RESERVATION ]] || die "--reservation $RESERVATION goes with --capacity reserved" ;;
        reserved) require --reservation ;;
        *) die "--capacity $CAPACITY is none of on-demand, spot, reserved" ;;
    esac
fi
if [[ " start watch resume " == *" $VERB "* ]]; then
    require --image
    check_command
fi
[[ -z $IMAGE || $IMAGE =~ ^[a-z0-9][a-z0-9._/:@-]*$ ]] || die "--image $IMAGE is no image's name"

WHERE=("--cluster=$CLUSTER" "--zone=$ZONE")
[[ -z $PROJECT ]] || WHERE+=("--project=$PROJECT")

cluster() {
    local capacity="--$CAPACITY"
    [[ $CAPACITY != reserved ]] || capacity="--reservation=$RESERVATION"
    say "$SLICES x $ACCELERATOR is $((SLICES * CHIPS)) chips, $CAPACITY"
    run xpk cluster create "${WHERE[@]}" "--tpu-type=$ACCELERATOR" "--num-slices=$SLICES" "$capacity" \
        --enable-gcsfuse-csi-driver
    # Metadata is not cached: a host must see at once what another has written. The size is a formality of volumes.
    run xpk storage attach marsjax "${WHERE[@]}" --type=gcsfuse "--bucket=$BUCKET" "--mount-point=$MOUNT" \
        --auto-mount=true --readonly=false --size=1000 --no-prefetch-metadata \
        --mount-options=implicit-dirs,metadata-cache:ttl-secs:0
}

image() {
    local root
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    run docker build --platform=linux/amd64 --tag="$IMAGE" --file="$root/launch/Dockerfile" "$root"
    run docker push "$IMAGE"
}

# JAX finds hosts and slices itself (auto). exec: so that a pod's SIGTERM reaches the trainer, which then saves.
# JobSet starts all again after exit codes 42 and 127 to 255; 1 to 126 said what is wrong and end the workload. The first
# host to end decides: unlike tpu_vm.sh it does not wait for what the others say.
start() {
    local pair environment=()
    for pair in MARSJAX_COORDINATOR=auto PYTHONUNBUFFERED=1 "${ENVIRONMENT[@]}"; do environment+=("--env=$pair"); done
    run xpk workload create "${WHERE[@]}" "--workload=$NAME" "--tpu-type=$ACCELERATOR" "--num-slices=$SLICES" \
        "--docker-image=$IMAGE" "--max-restarts=$RESTARTS" --termination-grace-period-seconds=120 \
        "${environment[@]}" "--command=exec $(quoted "${COMMAND[@]}")"
}

delete() { run xpk workload delete "${WHERE[@]}" "--workload=$NAME" --force; }

wait_for_end() {
    run xpk workload list "${WHERE[@]}" "--wait-for-job-completion=$NAME" "--timeout=$POLL"
}

watch() {
    local submitted=0 code
    while :; do
        code=0
        wait_for_end || code=$?
        case $code in
            0)
                say "workload $NAME has ended well"
                return 0
                ;;
            124) ;; # still running when the time was up
            125)
                ((submitted < RECREATE)) ||
                    die "workload $NAME has failed; see: launch/gke.sh logs, and resume once the reason is gone"
                submitted=$((submitted + 1))
                say "workload $NAME has failed; submitting it again ($submitted of $RECREATE)"
                delete || say "it cannot be deleted"
                start || say "it was refused"
                ;;
            *)
                say "no answer about $NAME (xpk: exit code $code)"
                sleep "$POLL"
                ;;
        esac
    done
}

case $VERB in
    cluster) cluster ;;
    image) image ;;
    start) start ;;
    watch)
        if $DRY_RUN; then
            echo "# until it has ended:"
            wait_for_end
            echo "# if it has failed, up to $RECREATE times:"
            delete
            start
        else
            watch
        fi
        ;;
    resume)
        delete || say "there is none to delete"
        start
        ;;
    status) run xpk workload list "${WHERE[@]}" "--filter-by-job=^$NAME\$" ;;
    logs)
        run xpk workload list "${WHERE[@]}" "--filter-by-job=^$NAME\$" # which points kubectl to the cluster
        run kubectl logs --follow --container=jax-tpu \
            "--selector=jobset.sigs.k8s.io/jobset-name=$NAME,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
        ;;
    delete) delete ;;
    delete-cluster) run xpk cluster delete "${WHERE[@]}" --force ;;
esac
