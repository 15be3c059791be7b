"""Launchers without a cluster: the output of --dry-run, workers started by hand, runs' names, and
mistakes.
"""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import tyro
import yaml

from clusterenv_runtime import ClusterEnv
from clusterenv_runtime.errors import StartupError
from clusterenv_runtime.extras.slurm import Allocation, SlurmLauncher
from clusterenv_runtime.head import workers as supervision
from clusterenv_runtime.launchers import ExternalLauncher, LocalLauncher
from clusterenv_runtime.launchers.local import VARIABLE
from clusterenv_runtime.options import ClusterOptions
from clusterenv_runtime.security import HeadKeys, WorkerKeys, read_key_file
from clusterenv_runtime.worker.__main__ import parse
from clusterenv_utils.arguments import ScriptArgs

from .envs import CountingEnv
from .machine import process_namespace
from .patience import PATIENCE
from .scripts import ROOT, check_refusal_here, environment, lasting, run

TINY = shlex.split(
    "--env-id CartPole-v1 --envs-per-worker 2 --num-steps 16 --num-minibatches 2 --eval-episodes 2"
)
SCONTROL = """#!/bin/sh
case $* in
    "show hostnames n[1-3]") printf 'n1\\nn2\\nn3\\n' ;;
    "show hostnames n[2-3]") printf 'n2\\nn3\\n' ;;
    "--oneliner show node n2") echo "NodeName=n2 Arch=x86_64 NodeAddr=127.0.0.2 NodeHostName=n2" ;;
    *) echo "slurm_load_node error: $*" >&2; exit 1 ;;
esac
"""
JOB = {"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1", "SLURM_CPUS_PER_TASK": "2"}
PLAIN = {**JOB, "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "4(x2),2"}
HET = {
    **JOB,
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_CPUS_PER_NODE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "4(x2)",
    "SLURM_CPUS_PER_TASK_HET_GROUP_1": "1",
}


@pytest.fixture
def path(tmp_path):
    """Return a PATH with stand-ins for Slurm's commands."""
    (tmp_path / "bin").mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", "#!/bin/sh\nexit 1\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    "golden, flags, env",
    [
        ("local", "--num-workers 2 --worker-prefix='nice -n 19'", {}),
        ("slurm", "--launcher slurm --num-workers 4 --port 5555", PLAIN),
        ("slurm_cores", "--launcher slurm --num-workers 2 --worker-resources CPU=2", PLAIN),
        (
            "hetjob",
            "--launcher slurm --num-workers 3 --worker-prefix='apptainer exec image.sif'",
            HET,
        ),
        ("external", "--launcher external --num-workers 2 --bind-address lo", {}),
    ],
)
def test_a_dry_run_prints_what_would_run_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, path, golden, flags, env
):
    for name in ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": path, **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["ppo", *TINY, *shlex.split(flags), "--run-name", "name", "--dry-run"]
    )
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / "ppo_clusterenv.py"), run_name="__main__")
    assert not exit.value.code
    text = capsys.readouterr().out.replace(sys.executable, "PYTHON").replace(str(tmp_path), "HERE")
    text = re.sub(r"--head-pid \d+", "--head-pid PID", text.replace(str(ROOT), "ROOT"))
    text = text.replace("PYTHON -B ", "PYTHON ")  # this process may have that flag
    text = re.sub(r"sys\.path\[:\] = \[.*\]", "sys.path[:] = PATH", text)
    file = ROOT / "tests" / "golden" / f"dry_run_{golden}.txt"
    assert text == file.read_text() and not (tmp_path / "runs").exists()


def test_a_steps_environment_has_no_mark_and_nothing_that_makes_srun_divide_the_cores(
    monkeypatch, path
):
    for name, value in {"PATH": path, **PLAIN}.items():
        monkeypatch.setenv(name, value)
    divide = (
        "SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS_PER_NODE SLURM_NTASKS SLURM_NPROCS"
    )
    shared = "SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_MEM_PER_CPU SLURM_CPU_BIND_TYPE"
    for name in (*divide.split(), *shared.split()):
        monkeypatch.setenv(name, "1")
    # The shared variables contradict the flags of a step with its own cores.
    for resources, kept in (("", shared), ("CPU=2", "")):
        launcher = SlurmLauncher(resources=resources)
        launcher.check(1)
        launcher.prepare(1, [], "")
        names = [name for name in launcher.environment("a mark") if re.match("SLURM|SRUN", name)]
        assert set(names) == set(PLAIN) - {"SLURM_CPUS_PER_TASK"} | set(kept.split())
        assert VARIABLE not in launcher.environment("a mark")


@pytest.fixture
def start_steps(monkeypatch, path):
    """Return a function that starts workers with a number of cores each. It returns their launcher.

    Besides the head's cores, the node n1 has 2 cores, n2 has 4 and n3 has 2.
    """
    for name, value in {"PATH": path, **PLAIN}.items():
        monkeypatch.setenv(name, value)
    launchers = []

    def start(cores, number):
        launcher = SlurmLauncher(resources=f"CPU={cores}" if cores else "")
        launchers.append(launcher)
        launcher.check(number)
        launcher.prepare(number, [], "nowhere")
        launcher.start()
        return launcher

    yield start
    for launcher in launchers:
        launcher.stop(0)


def node_of(launcher, worker):
    (node,) = (word for word in launcher.command(worker) if word.startswith("--nodelist="))
    return node.removeprefix("--nodelist=")


@pytest.mark.parametrize(
    ("cores", "number", "index", "before", "after"),
    [  # the cores of each worker, the workers, the replaced worker, and its nodes
        (0, 2, 1, "n1", "n2"),  # the next node, because all cores are shared
        (1, 2, 1, "n2", "n3"),
        (2, 3, 2, "n3", "n2"),  # n1 is full
        (3, 1, 0, "n2", "n2"),  # no other node has 3 cores
    ],
)
def test_a_replacement_goes_where_cores_are_left(start_steps, cores, number, index, before, after):
    launcher = start_steps(cores, number)
    assert node_of(launcher, index) == before
    launcher.start_worker(index)  # srun has not said that the worker itself has ended
    assert node_of(launcher, index) == after


def test_workers_go_to_where_cores_are_left():
    assert Allocation({"a": 1, "b": 3, "c": 2}, 1, "a", False).places(7) == [*"bcbacba"]
    assert Allocation({"a": 0, "b": 4}, 2, "a", False).places(3) == [*"bba"]
    assert Allocation({"a": 2, "b": 4}, 1, "a", False).places(3, own_cores=2) == [*"bab"]


SLURM = "--launcher slurm"


@pytest.mark.parametrize(
    "flags, env, says",
    [
        (SLURM, {}, "the launcher slurm starts workers inside a job, and there is none"),
        (
            SLURM,
            {**PLAIN, "PATH": os.path.dirname(sys.executable)},
            "cannot run scontrol ([Errno 2]",
        ),
        (SLURM, {**PLAIN, "SLURM_JOB_NODELIST": "x"}, "hostnames x: slurm_load_node error"),
        ("--launcher external", {}, "launcher external needs bind_address: an address that its"),
        ("--worker-resources CPU=1", {}, "goes with a launcher that gives workers resources, not"),
        (f"{SLURM} --worker-resources GPU=1", PLAIN, "must be CPU=NUMBER with the launcher slurm"),
        (f"{SLURM} --worker-resources CPU=0.5", PLAIN, "whole cores for each worker, got CPU=0.5"),
        (
            f"{SLURM} --worker-resources CPU=3",
            PLAIN,
            "for worker 1: submit the job with --cpus-per-task=3",
        ),
        (f"{SLURM} --worker-resources CPU=5", HET, "second part of the job with --cpus-per-task=5"),
        ("--worker-prefix 'nice", {}, "worker_prefix 'nice: No closing quotation"),
        ("--worker-prefix nonesuch", {}, "worker_prefix: there is no program nonesuch here"),
        ("--key-file no --bind-address 127.0.0.1", {}, "cannot read the key file no: No such file"),
        ("--dry-run --exp-name=", {}, "--exp-name must be of letters"),
    ],
)
def test_mistakes_are_told_before_anything_starts(empty, monkeypatch, path, flags, env, says):
    for name, value in {"PATH": path, **env}.items():
        monkeypatch.setenv(name, value)
    flags = [*TINY, *flags.split()]
    check_refusal_here(monkeypatch, "ppo_clusterenv.py", empty, flags, says)


def test_a_prefix_may_have_the_worker_as_its_child(workers):
    launcher = LocalLauncher(prefix="sh -c '\"$@\"; exit $?' sh")
    with ClusterEnv([CountingEnv] * 2, 2, launcher=launcher) as envs:
        envs.reset()
        assert {command[0] for command in workers().values()} == {"sh"}
        os.killpg(min(workers()), signal.SIGKILL)
        envs.step([0, 0])
        assert len(envs.restarts) == 1


def test_a_prefix_may_give_the_worker_its_own_namespace_of_processes():
    container = process_namespace()
    with ClusterEnv([CountingEnv] * 2, 2, worker_prefix=shlex.join(container)) as envs:
        envs.reset()
        assert envs.call("pid") == (1, 1)


# Runs a script. At its end, its workers have more than the usual 3 seconds to read that they must
# end.
PATIENT = f"""
import functools, runpy, sys
from clusterenv_runtime import ClusterEnv
ClusterEnv.close = functools.partialmethod(ClusterEnv.close, timeout={PATIENCE})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_workers_started_by_hand_train_and_are_awaited_again(tmp_path):
    command = [sys.executable, "-m", "clusterenv_runtime.keys", "key"]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True)
    flags = "--launcher external --bind-address 127.0.0.1 --key-file key --run-name name"
    flags = [*TINY, *flags.split(), *lasting(tmp_path, 0, 0.005), "--total-timesteps", "12800"]
    process = start_script(tmp_path, "-c", PATIENT, str(ROOT / "ppo_clusterenv.py"), *flags)
    workers = []

    def start(line):
        command = shlex.split(line)
        variables = [f"{name}=1" for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED")]
        assert command[:4] == ["env", *variables, "python"]
        workers.append(
            subprocess.Popen([sys.executable, *command[4:]], cwd=tmp_path, env=environment())
        )

    try:
        assert process.stdout.readline().startswith("runs/")
        assert process.stdout.readline().startswith("run these")
        lines = [process.stdout.readline() for _ in range(2)]
        assert shlex.split(lines[0])[-6:-4] == ["--key-file", "key.worker"]
        for line in lines:
            start(line)
        said = (line for line in process.stdout if not line.startswith("starting"))
        assert next(said).startswith("2 workers ready in ")
        assert next(said).startswith("step")
        workers[1].kill()
        # Its command is printed again.
        line = next(line for line in process.stdout if not line.startswith("step"))
        assert line == lines[1]
        start(line)
        assert next(line for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 75 and "worker 1 (" in errors
        assert [worker.wait(PATIENCE) for worker in workers] == [0, -signal.SIGKILL, 0]
        assert not list((tmp_path / "runs" / "name" / "workers").iterdir())
    finally:
        for each in (process, *workers):
            each.kill()
            each.wait()


def start_script(directory, *command):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=directory, env=environment(), **pipes)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_waiting_for_workers_ends_at_once_when_told_to(tmp_path, number, code):
    flags = [*TINY, "--launcher", "external", "--bind-address", "127.0.0.1", "--run-name", "name"]
    process = start_script(tmp_path, str(ROOT / "ppo_clusterenv.py"), *flags)
    lines = [process.stdout.readline() for _ in range(4)]
    assert "clusterenv_runtime.worker" in lines[3]
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)  # it would wait for workers forever
    assert (process.returncode, errors) == (code, "interrupted\n")
    assert not list(tmp_path.iterdir())  # the run never began


class Queue(ExternalLauncher):
    """A launcher whose worker waits in a queue, then counts as started, but never connects."""

    waits = 3

    def start_worker(self, index):
        pass

    def pending(self, index):
        self.waits -= 1
        return "the queue is long" if self.waits > 0 else None


def test_time_in_a_queue_is_told_and_does_not_count(monkeypatch, caplog):
    monkeypatch.setattr(supervision, "NOTICE_S", 0.0)
    launcher = Queue()
    with pytest.raises(
        StartupError, match="did not come up or build the next environment within 0.01 s"
    ):
        ClusterEnv(
            [CountingEnv], 1, launcher=launcher, bind_address="127.0.0.1", startup_timeout=0.01
        )
    assert launcher.waits <= 0
    assert [record.message for record in caplog.records] == [
        "still waiting for worker 0 to be started: the queue is long"
    ] * 2


def test_keys_made_ahead_are_private_and_separate_for_head_and_workers(tmp_path):
    command = [sys.executable, "-m", "clusterenv_runtime.keys", "key"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert result.stdout == "key is for the head, key.worker for the workers\n"
    keys = read_key_file(tmp_path / "key", HeadKeys)
    for name in ("key", "key.worker"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert read_key_file(tmp_path / "key.worker") == keys.workers()
    assert type(keys.workers()) is WorkerKeys
    assert keys.server_secret not in (tmp_path / "key.worker").read_text()
    with pytest.raises(StartupError, match="is not a head's key file"):
        read_key_file(tmp_path / "key.worker", HeadKeys)
    again = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (1, "error: cannot write key: File exists\n")


SCHEMA = "1.37"  # the newest version of Kubernetes that has a schema


def manifest(name):
    return list(yaml.safe_load_all((ROOT / "docs" / name).read_text()))


def test_the_manifest_is_valid_and_its_parts_fit():
    documents = manifest("kubernetes.yaml")
    service, claim, head_job, workers, closed, policy = documents
    for document in documents:
        kubernetes_validate.validate(document, SCHEMA, strict=True)
    number, pod = workers["spec"]["completions"], head_job["spec"]["template"]["spec"]
    (container,), (worker,) = pod["containers"], workers["spec"]["template"]["spec"]["containers"]
    (port,) = (str(port["port"]) for port in service["spec"]["ports"])
    assert f"--num-workers={number}" in container["args"]
    assert workers["spec"]["parallelism"] == number
    assert f"--connect=tcp://{service['metadata']['name']}:{port}" in worker["args"]
    assert f"--port={port}" in container["args"]
    assert service["spec"]["selector"] == {"job-name": head_job["metadata"]["name"]}
    claims = [each.get("persistentVolumeClaim") for each in pod["volumes"]]
    assert {"claimName": claim["metadata"]["name"]} in claims
    assert worker["image"] == container["image"]
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    (rule,) = policy["spec"]["ingress"]
    (of_worker,) = rule["from"]
    assert of_worker["podSelector"]["matchLabels"] == {"job-name": workers["metadata"]["name"]}
    assert rule["ports"] == [{"port": int(port)}]


def test_the_jobset_is_of_the_same_jobs():
    _, claim, head, workers, closed, policy = manifest("kubernetes.yaml")
    other_claim, jobs, other_closed, other_policy = manifest("jobset.yaml")
    assert (other_claim, other_closed) == (claim, closed)
    label = "jobset.sigs.k8s.io/replicatedjob-name"
    assert other_policy["spec"]["podSelector"]["matchLabels"][label] == "head"
    (rule,) = other_policy["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"][label] == "workers"
    assert rule["ports"] == policy["spec"]["ingress"][0]["ports"]
    kubernetes_validate.validate(other_policy, SCHEMA, strict=True)
    spec, name = jobs["spec"], jobs["metadata"]["name"]
    assert spec["network"]["enableDNSHostnames"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["head"]
    for job, plain in zip(spec["replicatedJobs"], (head, workers), strict=True):
        whole = {**plain, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(whole, SCHEMA, strict=True)
        for setting in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):  # of the JobSet
            del plain["spec"][setting]
        text = yaml.dump(plain["spec"]).replace(
            "tcp://clusterenv-head:", f"tcp://{name}-head-0-0.{name}:"
        )
        assert yaml.dump(job["template"]["spec"]) == text


def test_the_manifests_head_begins_a_run_or_goes_on(tmp_path):
    (container,) = manifest("kubernetes.yaml")[2]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)

    def start():
        path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
        command = [*container["command"], *container["args"]]
        result = subprocess.run(
            command, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=True
        )
        words = result.stdout.splitlines()
        assert words[0] == "ppo_clusterenv.py" and words[1:-2] == container["args"][3:]
        return words[-2:]

    assert start() == ["--run-name", "run"]
    (tmp_path / "runs" / "run").mkdir(parents=True)
    assert start() == ["--run-name", "run"]  # a folder without a checkpoint is moved away
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("without-checkpoint-")
    (tmp_path / "runs" / "run").mkdir()
    (tmp_path / "runs" / "run" / "checkpoint-128.pt").touch()
    assert start() == ["--resume", "runs/run"]


@pytest.mark.parametrize("rank", [0, 2])
def test_skypilots_first_machine_runs_the_head_and_the_others_a_worker(rank, tmp_path):
    (task,) = manifest("skypilot.yaml")
    for name in ("run.key", "run.key.worker"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    variables = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        "SKYPILOT_NODE_RANK": str(rank),
    }
    bash = ["bash", "-ec", task["run"]]
    result = subprocess.run(bash, env=variables, capture_output=True, text=True, check=True)
    (line,) = result.stdout.splitlines()
    threads, _, words = line.partition(" ")
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
    if rank == 0:
        args = tyro.cli(ScriptArgs, args=words.split()[1:])
        assert (args.num_workers, args.bind_address) == (task["num_nodes"] - 1, "10.0.0.1")
        assert args.key_file == f"{tmp_path}/run.key"
    else:
        args = parse(words.split()[2:])
        assert (args.index, args.connect) == (rank - 1, "tcp://10.0.0.1:5555")
        assert (threads, args.key_file) == ("1", f"{tmp_path}/run.key.worker")


def test_another_package_may_add_a_launcher(tmp_path, empty, monkeypatch, workers):
    (tmp_path / "added.py").write_text(
        "from clusterenv_runtime import LocalLauncher\n"
        "class AddedLauncher(LocalLauncher):\n"
        "    name = 'added'\n"
        "    def command(self, index):\n"
        "        return ['env', 'ADDED=yes', *super().command(index)]\n"
    )
    information = tmp_path / "added-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[clusterenv.launchers]\nadded = added:AddedLauncher\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ClusterEnv([CountingEnv] * 2, 2, launcher="added", worker_prefix="nice -n 1") as envs:
        envs.reset()
        for pid in workers():
            assert b"ADDED=yes" in Path(f"/proc/{pid}/environ").read_bytes()
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + 1
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(niceness, 19)
    flags = [*TINY, "--launcher", "added", "--run-name", "name", "--dry-run"]
    result = run("ppo_clusterenv.py", tmp_path, *flags, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert result.returncode == 0 and "env ADDED=yes" in result.stdout, result.stderr
    says = "launcher must be one of 'added', 'external', 'local', 'ray', 'slurm', got 'nonesuch'"
    flags = [*TINY, "--launcher", "nonesuch"]
    check_refusal_here(monkeypatch, "ppo_clusterenv.py", empty, flags, says)


@pytest.mark.parametrize(("number", "pulse"), [(50, []), (400, ["--pulse", "0.4"])])
def test_many_workers_show_less_often_that_they_live(number, pulse):
    flags = ClusterOptions(num_workers=number).worker_flags(LocalLauncher(), "ipc://head", None)
    assert flags == [
        *("--connect", "ipc://head", "--startup-timeout", "60.0"),
        *pulse,
        *("--head-timeout", "30.0"),
    ]
