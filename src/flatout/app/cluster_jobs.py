"""A training as a cluster's scheduler takes it: a batch script for Slurm, manifests for Kubernetes.

Both start `flatout-torchrun` on each node, which starts ranks and agents again, and both hand a notice to end on to the ranks.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from flatout.core.errors import UsageError
from flatout.core.exit_codes import ENDED_ON_REQUEST

_SPARE_S: Final = 10
"""Seconds of a grace that are left to launchers after the ranks had theirs."""
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
"""A name of Kubernetes (RFC 1035), short enough for what is made of it."""
_TIME: Final = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_MEMORY: Final = re.compile(r"\d+(\.\d+)?([kMGTP]|[KMGTP]i)?")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:@%+,=^-]+")


class ClusterJob(NamedTuple):
    """A script, or a module, with its arguments, on `nodes` nodes with so many ranks each.

    `max_restarts` counts starts of all ranks, `grace_s` the seconds between the notice and the end of the job.
    """

    words: tuple[str, ...]
    name: str
    nodes: int
    nproc: int
    max_restarts: int = 100
    grace_s: int = 120

    def check(self) -> None:
        """Raise UsageError for numbers and names that no scheduler takes."""
        if self.nodes < 1 or self.nproc < 1 or self.max_restarts < 0:
            raise UsageError(
                f"nodes {self.nodes}, ranks {self.nproc}, restarts {self.max_restarts}; give 1 or more, 1 or more, 0 or more"
            )
        if self.grace_s <= _SPARE_S:
            raise UsageError(
                f"grace {self.grace_s} s; give more than {_SPARE_S} s, of which ranks have all but these to save their state"
            )
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"'{self.name}' is no name of a job: give small letters, digits and '-', beginning with a letter"
            )


def job_name(target: str) -> str:
    """A name of a job, made of the script's or module's.

    >>> job_name("runs/Train_GPT.py"), job_name("my.package.train"), job_name("2.py")
    ('train-gpt', 'my-package-train', 'job-2')
    """
    base = target.rpartition("/")[2].removesuffix(".py").lower()
    words = re.sub("[^a-z0-9]+", "-", base).strip("-")[:40].strip("-")
    return words if words[:1].isalpha() else f"job-{words}".strip("-")


def _launched(job: ClusterJob, *, endpoint: str, run_id: str, is_first: str) -> str:
    """What is started on each node, in the shell's words: `endpoint` and `run_id` are expanded there, and `is_first` is a command
    that succeeds on the node that has the rendezvous. Torch would guess which it is by the names of machines."""
    fixed = ["flatout-torchrun", "--nnodes", job.nodes, "--nproc-per-node", job.nproc, "--rdzv-backend", "c10d"]
    restarts = ["--max-restarts", job.max_restarts, "--agent-restarts", job.max_restarts]
    return " ".join(
        [
            *map(str, fixed),
            f'--rdzv-endpoint "{endpoint}" --rdzv-id "{run_id}" --rdzv-conf "is_host=$({is_first} && echo 1 || echo 0)"',
            *map(str, restarts),
            shlex.join(job.words),
        ]
    )


# -- Slurm -------------------------------------------------------------------------------------------------------------------


class SlurmOptions(NamedTuple):
    """What a batch job asks Slurm for; empty is what the cluster does by itself."""

    gpus: int = 0
    cpus: int = 0
    memory: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    setup: tuple[str, ...] = ()
    """Lines of bash before the start, such as to load a module or to activate an environment."""
    further: tuple[str, ...] = ()
    """Further options of sbatch, such as --constraint=h100."""


def slurm_script(job: ClusterJob, options: SlurmOptions) -> str:
    """A batch script for sbatch. Raises UsageError for what Slurm would not take.

    Before the time is over, and when the job is preempted, Slurm sends SIGTERM to the step. Its ranks save their state and end
    with code 75. When the time is over the job puts itself into the queue again then; after preemption and lost nodes Slurm does
    so (--requeue). A step whose launcher was killed on a node is started again within the job."""
    job.check()
    if options.time and not _TIME.fullmatch(options.time):
        raise UsageError(f"time '{options.time}' is none of Slurm's; give [days-]hours:minutes:seconds, or minutes")
    if options.memory and not _MEMORY.fullmatch(options.memory):
        raise UsageError(f"memory '{options.memory}' is none of Slurm's; give a number with K, M, G or T")
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{job.grace_s}",
    }
    for name, value in asked.items():
        if value and not _PLAIN.fullmatch(f"{value}"):
            raise UsageError(f"{name} '{value}' has a space or a sign that a line #SBATCH cannot have")
    head = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    head += ["#SBATCH --requeue", *(f"#SBATCH {one}" for one in options.further)]
    first = '[ "$SLURM_NODEID" = 0 ]'
    step = _launched(job, endpoint="$head:$port", run_id="slurm-$SLURM_JOB_ID", is_first=first)
    return "\n".join(
        [
            "#!/bin/bash",
            *head,
            "",
            *options.setup,
            *(["", ""][: bool(options.setup)]),
            "# the first node, as Slurm reaches it, and a port of this job's own",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "head=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p' | head -n 1)",
            "port=$((20000 + SLURM_JOB_ID % 30000))",
            "export head port",
            f"export FLATOUT_GRACE_S={job.grace_s - _SPARE_S}",
            "",
            "# Slurm ends the job: the step gets SIGTERM as well, and saves its state; preempted jobs are queued again by Slurm",
            "asked=",
            "trap 'asked=1' TERM",
            f"for start in $(seq 0 {job.max_restarts}); do",
            f"    srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {step}')} &",
            "    step=$!",
            '    wait "$step"',
            "    code=$?",
            '    while kill -0 "$step" 2>/dev/null; do',
            '        wait "$step"',
            "        code=$?",
            "    done",
            "    # 128 and more: a launcher was killed; else the training has ended, in one way or another",
            '    if [ -n "$asked" ] || [ "$code" -lt 128 ]; then break; fi',
            '    echo "a launcher was killed (exit code $code); the step starts again"',
            "done",
            "# asked to end by a notice before the time is over, which this script does not get",
            f'if [ "$code" -eq {ENDED_ON_REQUEST} ] && [ -z "$asked" ]; then',
            '    echo "the training was asked to end, and its state is saved; the job goes into the queue again"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


# -- Kubernetes --------------------------------------------------------------------------------------------------------------


class KubernetesOptions(NamedTuple):
    """What pods are made of. `shared_memory` is that of /dev/shm, where copies of the state lie."""

    image: str
    namespace: str = ""
    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""
    hang_s: int = 900
    start_s: int = 1800
    environment: Mapping[str, str] = {}
    claim: str = ""
    """A persistent volume claim, and where it is seen: NAME:/path."""


def kubernetes_manifests(job: ClusterJob, options: KubernetesOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """A TrainingRuntime and a TrainJob of it, for Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1).

    A pod restarts in its place when its launcher ends with an error, or when `flatout job alive` finds that its ranks have done
    no step for long. Copies in /dev/shm outlive that, and a pod that is evicted has the grace to save. Raises UsageError."""
    job.check()
    if not options.image:
        raise UsageError("give the image that has flatout and the script")
    for name, value in (("memory", options.memory), ("shared memory", options.shared_memory)):
        if value and not _MEMORY.fullmatch(value):
            raise UsageError(f"{name} '{value}' is no quantity of Kubernetes; give a number with Mi or Gi")
    claim, _, where = options.claim.partition(":")
    if options.claim and not (claim and where.startswith("/")):
        raise UsageError(f"'{options.claim}' is no claim with a path; give NAME:/path")
    metadata: dict[str, Any] = {"name": job.name, **({"namespace": options.namespace} if options.namespace else {})}
    resources: dict[str, Any] = {}
    if options.gpus:
        resources["nvidia.com/gpu"] = f"{options.gpus}"
    resources |= {name: value for name, value in (("cpu", options.cpus), ("memory", options.memory)) if value}
    medium: dict[str, Any] = {"medium": "Memory"}
    if options.shared_memory:
        medium["sizeLimit"] = options.shared_memory
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": medium}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "data", "mountPath": where})
    alive = ["flatout", "job", "alive", "--within", f"{options.hang_s}", "--start", f"{options.start_s}"]
    container = {
        "name": "node",
        "volumeMounts": mounts,
        "livenessProbe": {"exec": {"command": alive}, "periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 2},
    }
    pod = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
        "volumes": volumes,
    }
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": job.max_restarts, "template": {"spec": pod}},
        },
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}},
    }
    first = '[ "$PET_NODE_RANK" = 0 ]'
    started = _launched(job, endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT", run_id=job.name, is_first=first)
    variables = {"FLATOUT_GRACE_S": f"{job.grace_s - _SPARE_S}", **options.environment}
    trainer: dict[str, Any] = {
        "image": options.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.nproc,
        "command": ["/bin/sh", "-c", f"exec {started}"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    if resources:
        trainer["resourcesPerNode"] = {"limits": resources, "requests": resources}
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": trainer,
        },
    }
    return runtime, train_job


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Documents of mappings, lists, text and numbers as YAML.

    >>> print(as_yaml([{"a": {"b": [1, "x: y"], "c": {}}}]), end="")
    ---
    a:
      b:
        - 1
        - "x: y"
      c: {}
    """
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(one)) for one in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        found = []
        for key, inner in value.items():
            below = _lines(inner)
            is_simple = not isinstance(inner, (Mapping, list)) or not inner
            found += [f"{key}: {below[0]}"] if is_simple else [f"{key}:", *(f"  {line}" for line in below)]
        return found
    if isinstance(value, list) and value:
        found = []
        for inner in value:
            first, *rest = _lines(inner)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS:
        return [value]
    return [_quoted(value) if isinstance(value, str) else json.dumps(value)]


def _quoted(text: str) -> str:
    """Text in double quotes, all but printable ASCII as escapes (YAML 1.2.2, section 5.7)."""
    signs = []
    for sign in text:
        code = ord(sign)
        if sign in '"\\':
            signs.append(f"\\{sign}")
        else:
            signs.append(sign if 32 <= code < 127 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}")
    return f'"{"".join(signs)}"'


_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
"""Text that YAML would read as something else."""
