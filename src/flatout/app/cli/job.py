"""`flatout job`: a training as a batch script for Slurm, as manifests for Kubernetes, and whether it still makes steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command, help_epilog
from flatout.app.cli.options import Arguments, ModuleName, require_writable, target_of
from flatout.core.errors import UsageError

if TYPE_CHECKING:
    from flatout.app.cluster_jobs import ClusterJob

job = typer.Typer(help="A training for a cluster's scheduler: `flatout job slurm`, `flatout job kubernetes`.")

Script = Annotated[
    str | None,
    typer.Argument(metavar="SCRIPT", help="The script, as the nodes see it, as you would give it to torchrun."),
]
Nodes = Annotated[int, typer.Option(metavar="N", help="Machines.")]
Nproc = Annotated[int | None, typer.Option(metavar="N", help="Ranks on each. [default: one for each GPU, else 1]")]
Gpus = Annotated[int, typer.Option(help="GPUs of each machine.")]
Name = Annotated[str, typer.Option(help="The job's name. [default: the script's]")]
Restarts = Annotated[int, typer.Option(help="How often ranks, and agents, are started again.")]
Grace = Annotated[
    int, typer.Option(metavar="SECONDS", help="From the notice to end to the end: the state is saved meanwhile.")
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to this file. [default: print it]")
]


@job.command(
    epilog=help_epilog(
        "flatout job slurm --nodes 2 --gpus 8 --wall-time 24:00:00 --out train.sbatch train.py",
        "flatout job slurm --nproc 4 --partition low -m package.train -- --epochs 10",
    )
)
def slurm(
    script: Script = None,
    arguments: Arguments = None,
    nodes: Nodes = 1,
    nproc: Nproc = None,
    gpus: Gpus = 0,
    name: Name = "",
    max_restarts: Restarts = 100,
    grace: Grace = 120,
    cpus: Annotated[int, typer.Option(help="CPU cores of each machine.")] = 0,
    memory_limit: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each machine, such as 500G.")] = "",
    wall_time: Annotated[
        str, typer.Option(help="Longest time of one run, such as 24:00:00; it goes on in the next.")
    ] = "",
    partition: Annotated[str, typer.Option(help="Slurm's partition.")] = "",
    account: Annotated[str, typer.Option(help="Slurm's account.")] = "",
    qos: Annotated[str, typer.Option(help="Slurm's quality of service.")] = "",
    setup: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="A line of bash before the start; may be given again.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="A further option of sbatch; may be given again.")
    ] = None,
    out: Out = None,
    module: ModuleName = None,
) -> None:
    """Write a batch script that survives killed ranks, agents and nodes, and goes on after preemption and time limits."""
    from flatout.app.cluster_jobs import SlurmOptions, slurm_script

    require_writable(out=out)
    wanted = _cluster_job(script, arguments, module, nodes, nproc, gpus, name, max_restarts, grace)
    options = SlurmOptions(
        gpus=gpus,
        cpus=cpus,
        memory=memory_limit,
        time=wall_time,
        partition=partition,
        account=account,
        qos=qos,
        setup=tuple(setup or ()),
        further=tuple(sbatch or ()),
    )
    _give(slurm_script(wanted, options), out)


@job.command(
    epilog=help_epilog(
        "flatout job kubernetes --image me/train:1 --nodes 2 --gpus 8 --out train.yaml /work/train.py",
        "flatout job kubernetes --image me/train:1 --volume data:/data --env WANDB_MODE=offline /work/train.py",
    )
)
def kubernetes(
    script: Script = None,
    arguments: Arguments = None,
    image: Annotated[str, typer.Option(help="The image that has flatout and the script.")] = "",
    nodes: Nodes = 1,
    nproc: Nproc = None,
    gpus: Gpus = 0,
    name: Name = "",
    namespace: Annotated[str, typer.Option(help="The namespace.")] = "",
    max_restarts: Restarts = 100,
    grace: Grace = 120,
    cpus: Annotated[str, typer.Option(help="CPU cores of each pod, such as 16.")] = "",
    memory_limit: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each pod, such as 500Gi.")] = "",
    shared_memory: Annotated[str, typer.Option(help="Of that for /dev/shm, where copies of the state lie.")] = "",
    volume: Annotated[str, typer.Option(metavar="CLAIM:/PATH", help="A persistent volume claim, and its folder.")] = "",
    hang: Annotated[int, typer.Option(help="Seconds without a step after which a pod restarts.")] = 900,
    start: Annotated[int, typer.Option(help="Seconds that the first step of a start may take.")] = 1800,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the pods; may be given again.")
    ] = None,
    out: Out = None,
    module: ModuleName = None,
) -> None:
    """Write a TrainingRuntime and a TrainJob for Kubeflow Trainer 2, for `kubectl apply`."""
    from flatout.app.cluster_jobs import KubernetesOptions, as_yaml, kubernetes_manifests

    require_writable(out=out)
    pairs = [one.partition("=") for one in env or ()]
    if wrong := [name for name, equals, _ in pairs if not (name and equals)]:
        raise UsageError(f"--env '{wrong[0]}' names no value; give NAME=VALUE")
    wanted = _cluster_job(script, arguments, module, nodes, nproc, gpus, name, max_restarts, grace)
    options = KubernetesOptions(
        image=image,
        namespace=namespace,
        gpus=gpus,
        cpus=cpus,
        memory=memory_limit,
        shared_memory=shared_memory,
        hang_s=hang,
        start_s=start,
        environment={name: value for name, _, value in pairs},
        claim=volume,
    )
    _give(as_yaml(kubernetes_manifests(wanted, options)), out)


@job.command(epilog=help_epilog("flatout job alive --within 900", "flatout job alive --within 300 --start 600"))
def alive(
    within: Annotated[float, typer.Option(help="Seconds in which a step has to be done.")] = 900.0,
    start: Annotated[float, typer.Option(help="Seconds from the start of the container to the first step.")] = 1800.0,
    memory: Annotated[
        Path, typer.Option("--memory-folder", metavar="DIR", help="The folder in memory where copies of the state lie.")
    ] = Path("/dev/shm"),
) -> None:
    """Whether a training of this user on this machine still makes steps, for a health probe: exit code 0, else 1.

    It has to pass its state to a `flatout.Survivor`.
    """
    from flatout.blocks.elastic.alive import Life, life_of

    life: Life = life_of(memory)
    is_alive = life.is_alive(within_s=within, start_s=start)
    print(f"{'alive' if is_alive else 'not alive'}: {life.text()}")
    raise typer.Exit(0 if is_alive else 1)


def _cluster_job(
    script: str | None,
    arguments: list[str] | None,
    module: str | None,
    nodes: int,
    nproc: int | None,
    gpus: int,
    name: str,
    max_restarts: int,
    grace: int,
) -> ClusterJob:
    from flatout.app.cluster_jobs import ClusterJob, job_name

    target = target_of(script, module, arguments, example="`flatout job slurm --nodes 2 --gpus 8 train.py`")
    words = (*(("-m",) if target.is_module else ()), target.name, *target.arguments)
    return ClusterJob(
        words=words,
        name=name or job_name(target.name),
        nodes=nodes,
        nproc=nproc if nproc is not None else max(1, gpus),
        max_restarts=max_restarts,
        grace_s=grace,
    )


def _give(text: str, out: Path | None) -> None:
    from flatout.core.files import write_whole_file

    if out is None:
        print(text, end="")
    else:
        write_whole_file(out, text.encode())


COMMAND = Command(
    job,
    order=215,
    group="devices",
    examples=(
        "flatout job slurm --nodes 2 --gpus 8 --wall-time 24:00:00 --out train.sbatch train.py",
        "flatout job kubernetes --image me/train:1 --nodes 2 --gpus 8 --out train.yaml /work/train.py",
    ),
)
