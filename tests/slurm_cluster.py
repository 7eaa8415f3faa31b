"""A real Slurm on this machine: a controller and several nodes, each a slurmd of its own, in a folder.

Debian's packages slurm-wlm and munge have all that it takes; where they are not, tests that use it are skipped.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
_PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
RequeueExit=
KillWait=20
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=300
SlurmdTimeout=300
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Programs of Slurm that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PLACES) is None]


class SlurmCluster:
    """A Slurm of so many nodes, to be used in a `with`. Partition `low` is preempted by `high`, with a grace."""

    def __init__(self, folder: Path, *, num_nodes: int = 2, cpus: int = 4, grace_s: int = 20) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(num_nodes)]
        ports = _free_ports(1 + num_nodes)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1024"
            for name, port in zip(self.names, ports[1:], strict=True)
        )
        for name in ("state", *(f"spool-{node}" for node in self.names)):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)  # munge asks for it
        text = _CONFIGURATION.format(
            host=f"{socket.gethostname()}(127.0.0.1)",
            ports=ports,
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=folder,
            nodes=nodes,
            grace_s=grace_s,
        )
        self._configuration = folder / "slurm.conf"
        self._configuration.write_text(text.replace("RequeueExit=\n", ""))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of programs that talk to it."""
        return os.environ | {"SLURM_CONF": str(self._configuration), "PATH": _PLACES}

    def __enter__(self) -> SlurmCluster:
        munge = [
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key",
        ]
        munge += [f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log"]
        self._start("munged", *munge, f"--seed-file={self.folder}/munge.seed")
        self._wait((self.folder / "munge.socket").exists, "munged")
        self._start("slurmctld", "-D", "-i")
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.call("sinfo", "-h", "-o", "%T").stdout.split()[:1] == ["idle"], "nodes")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError):
            self.call("scancel", "--full", "-s", "KILL", "--state=RUNNING")
        for process in reversed(self._daemons.values()):
            process.terminate()
        for process in self._daemons.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def _start(self, program: str, *words: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("ab") as out:
            found = shutil.which(program, path=_PLACES)
            assert found is not None
            self._daemons[name or program] = subprocess.Popen(
                [found, *words], env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", "-D", "-N", name, name=name)

    def call(self, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a program that talks to it, to its end."""
        return subprocess.run(
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=self.folder,
            **options,
        )  # type: ignore[call-overload,no-any-return]

    def submitted(self, *words: str) -> str:
        """Submit a batch job; its number."""
        ended = self.call("sbatch", "--parsable", *words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip().partition(";")[0]

    def state(self, job: str) -> str:
        """A job's state, such as RUNNING."""
        text = self.call("scontrol", "show", "job", job).stdout
        return next((word.partition("=")[2] for word in text.split() if word.startswith("JobState=")), "")

    def field(self, job: str, name: str) -> str:
        """One of the fields of `scontrol show job`."""
        text = self.call("scontrol", "show", "job", job).stdout
        return next((word.partition("=")[2] for word in text.split() if word.startswith(f"{name}=")), "")

    def wait_for(self, job: str, *states: str, patience_s: float = 180.0) -> str:
        """Wait until a job is in one of those states; that state."""
        deadline = monotonic() + patience_s
        while (state := self.state(job)) not in states:
            if monotonic() > deadline:
                raise AssertionError(f"job {job} is {state} and not {states} after {patience_s:.0f} s\n{self.logs()}")
            sleep(0.2)
        return state

    def logs(self) -> str:
        """The last of what the daemons said."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def _wait(self, is_there: object, what: str) -> None:
        assert callable(is_there)
        deadline = monotonic() + 60
        while not is_there():
            if monotonic() > deadline:
                raise AssertionError(f"{what} did not come up\n{self.logs()}")
            sleep(0.1)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
