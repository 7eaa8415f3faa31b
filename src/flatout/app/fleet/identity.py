"""What a training job is called, whose it is and where it runs, from its process and the variables of launchers."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from flatout.blocks.elastic.launched import job_of
from flatout.blocks.recording.code import git, root_of
from flatout.blocks.recording.job_store.policy import FleetPolicy
from flatout.core.errors import CaptureError
from flatout.core.records.job import JobRecord
from flatout.core.runtime.cores import usable_cores
from flatout.core.secrets import redacted_arguments


class JobPlace(NamedTuple):
    """This process's rank among how many, in the whole job and on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def place_here(environment: Mapping[str, str]) -> JobPlace:
    """The place of this process in its job, once its process group is there; alone where there is none.

    Tasks of Slurm without a process group are jobs of their own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return JobPlace()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for local_rank, local_world_size in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_TASKS_PER_NODE")):
        digits = environment.get(local_world_size, "").partition("(")[0]  # Slurm's '2(x3)' is two on each node
        if environment.get(local_rank, "").isdigit() and digits.isdigit():
            return JobPlace(rank, world_size, int(environment[local_rank]), int(digits))
    return JobPlace(rank, world_size, rank, world_size)


def job_here(
    environment: Mapping[str, str], place: JobPlace, policy: FleetPolicy, *, began_s: float, version: str
) -> JobRecord:
    """The record of this process's job as it begins; `began_s` is a Unix time, `version` that of flatout."""
    name = _script_name()
    arguments = redacted_arguments(sys.argv[1:])
    restart = environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get("SLURM_RESTART_COUNT") or "0"
    node = environment.get("SLURMD_NODENAME") or environment.get("NODE_NAME") or socket.gethostname()
    root, is_git = root_of(Path.cwd())
    user = _user()
    device, num_gpus = _devices(place.local_world_size)
    own = secrets.token_hex(8)
    workload = environment.get("FLATOUT_WORKLOAD") or " ".join(
        (root.name, name, *arguments, device, str(place.world_size))
    )
    return JobRecord(
        id=own,
        job=_job(environment, own, node),
        began_s=began_s,
        written_s=began_s,
        name=name,
        workload=sha256(workload.encode()).hexdigest()[:16],
        command=" ".join((name, *arguments)),
        project=root.name,
        code_revision=_revision(root) if is_git else "",
        user=user,
        team=environment.get("FLATOUT_TEAM") or policy.team_of(user) or environment.get("SLURM_JOB_ACCOUNT", ""),
        partition=environment.get("SLURM_JOB_PARTITION", ""),
        node=node,
        rank=place.rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        restart=int(restart) if restart.isdigit() else 0,
        device=device,
        num_gpus=num_gpus,
        num_cores=usable_cores(),
        python=sys.version.partition(" ")[0],
        torch=str(torch.__version__),
        flatout=version,
    )


def with_parameters(record: JobRecord, optimizer: Any) -> JobRecord:
    """The record with the number of parameters that an optimizer steps, where the first look has not counted them yet."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return msgspec.structs.replace(record, num_parameters=sum(p.numel() for p in parameters))


def _job(environment: Mapping[str, str], own: str, node: str) -> str:
    """What the nodes and the restarts of a job share."""
    name = job_of(environment)
    if name is None:
        return own
    if name.startswith("torchrun of process"):
        several = environment.get("GROUP_WORLD_SIZE", "1") != "1"
        address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        name = f"torchrun at {address}" if several else f"{node} {name}"
    elif name.startswith("slurm"):
        name = f"{name}.{environment.get('SLURM_STEP_ID', '')} {environment.get('SLURM_CLUSTER_NAME', '')}"
    return sha256(name.encode()).hexdigest()[:16]


def _script_name() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and getattr(spec, "name", "__main__") not in ("__main__", None):
        return str(spec.name).removesuffix(".__main__")
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())


def _revision(root: Path) -> str:
    try:
        return git(root, "rev-parse", "HEAD").decode().strip()[:12]
    except CaptureError:
        return ""


def _devices(local_world_size: int) -> tuple[str, int]:
    """The device that the job runs on, and how many GPUs it has on this node."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "cpu", 0
    used = sum(torch.cuda.memory_reserved(i) > 0 for i in range(torch.cuda.device_count()))
    return torch.cuda.get_device_name(), max(1, used) * local_world_size
