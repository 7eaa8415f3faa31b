"""Batch scripts and manifests: what they say, what they refuse, and that the schedulers' own programs and schemas take them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flatout.app.cluster_jobs import (
    ClusterJob,
    KubernetesOptions,
    SlurmOptions,
    as_yaml,
    job_name,
    kubernetes_manifests,
    slurm_script,
)
from flatout.core.errors import UsageError

JOB = ClusterJob(words=("train.py", "--name", "it's; rm -rf $HOME"), name="train", nodes=2, nproc=8)


def test_arguments_reach_the_script_as_they_are(tmp_path: Path) -> None:
    script = slurm_script(JOB, SlurmOptions())
    line = next(line for line in script.splitlines() if "flatout-torchrun" in line)
    inner = shlex.split(line.strip().removesuffix(" &"))[-1].removeprefix("exec flatout-torchrun ")
    ended = subprocess.run(
        ["bash", "-c", f"head=n0; port=1; SLURM_JOB_ID=7; SLURM_NODEID=0; printf '%s\\n' {inner}"],
        capture_output=True,
        text=True,
        check=True,
    )
    words = ended.stdout.splitlines()
    assert words[-3:] == list(JOB.words)
    assert words[words.index("--rdzv-endpoint") + 1] == "n0:1" and words[words.index("--rdzv-id") + 1] == "slurm-7"
    assert words[words.index("--rdzv-conf") + 1] == "is_host=1"


def test_a_batch_script_is_one_for_bash_and_says_what_was_asked() -> None:
    options = SlurmOptions(
        gpus=8,
        cpus=64,
        memory="500G",
        time="1-00:00:00",
        partition="big",
        setup=("module load cuda",),
        further=("--exclusive",),
    )
    script = slurm_script(JOB, options)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    head = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--gpus-per-node=8", "--cpus-per-task=64", "--mem=500G", "--time=1-00:00:00"} <= set(head)
    assert {"--partition=big", "--signal=TERM@120", "--requeue", "--exclusive", "--ntasks-per-node=1"} <= set(head)
    assert not any("account" in line for line in head), "what is not asked is the cluster's to say"
    assert "\nmodule load cuda\n" in script


@pytest.mark.parametrize(
    ("job", "options", "says"),
    [
        (JOB._replace(nodes=0), SlurmOptions(), "nodes 0"),
        (JOB._replace(grace_s=10), SlurmOptions(), "grace 10 s"),
        (JOB._replace(name="Train it"), SlurmOptions(), "no name of a job"),
        (JOB, SlurmOptions(time="a day"), "time 'a day'"),
        (JOB, SlurmOptions(memory="much"), "memory 'much'"),
        (JOB, SlurmOptions(partition="a\n#SBATCH --wrap=x"), "partition"),
    ],
)
def test_what_slurm_would_not_take_is_refused(job: ClusterJob, options: SlurmOptions, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        slurm_script(job, options)


@given(st.text(min_size=1, max_size=80))
def test_a_name_is_made_of_any_script(target: str) -> None:
    JOB._replace(name=job_name(target)).check()


# -- Kubernetes --------------------------------------------------------------------------------------------------------------

OPTIONS = KubernetesOptions(
    image="me/train:1",
    namespace="research",
    gpus=8,
    cpus="64",
    memory="900Gi",
    shared_memory="400Gi",
    environment={"WANDB_MODE": "offline", "EMPTY": ""},
    claim="data:/data",
)


def _documents() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = yaml.safe_load_all(as_yaml(kubernetes_manifests(JOB, OPTIONS)))
    return runtime, job


def test_the_yaml_is_that_of_the_documents() -> None:
    assert _documents() == kubernetes_manifests(JOB, OPTIONS)


_VALUES: Any = st.recursive(
    st.text(max_size=12) | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True).filter(
        lambda name: name not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
    ), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "b", "spec"]), _VALUES, min_size=1))
def test_yaml_reads_back_what_was_written(document: dict[str, Any]) -> None:
    assert list(yaml.safe_load_all(as_yaml([document]))) == [document]


def test_kubeflows_own_models_take_them_and_lose_nothing() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, job = _documents()
    for document, model in (
        (runtime, models.TrainerV1alpha1TrainingRuntime),
        (job, models.TrainerV1alpha1TrainJob),
    ):
        assert model.from_dict(document).to_dict() == document


def test_pods_restart_in_their_place_and_have_a_probe_a_grace_and_shared_memory() -> None:
    runtime, job = _documents()
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure" and pod["terminationGracePeriodSeconds"] == JOB.grace_s
    (container,) = pod["containers"]
    assert container["livenessProbe"]["exec"]["command"][:3] == ["flatout", "job", "alive"]
    assert {one["mountPath"] for one in container["volumeMounts"]} == {"/dev/shm", "/data"}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "train"
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "64", "memory": "900Gi"}
    assert {"name": "EMPTY", "value": ""} in trainer["env"]
    reserved = {one["name"] for one in trainer["env"] if one["name"].startswith("PET_")}
    assert not reserved, "Kubeflow sets these"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (OPTIONS._replace(image=""), "image"),
        (OPTIONS._replace(memory="lots"), "memory 'lots'"),
        (OPTIONS._replace(claim="data"), "NAME:/path"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(options: KubernetesOptions, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        kubernetes_manifests(JOB, options)
