"""Files for Kubernetes, Slurm, Docker and the cluster launcher: valid, and in step with presets and commands."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from string import Template
from typing import Any

import jsonschema
import pytest
import yaml

from mobula.cluster.runtime.placement import needed_roles, plan_placement
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.cli.job_commands import CLOSE_S
from mobula.deploy.planning.clusters import described_nodes

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SBATCH = DEPLOY / "slurm" / "mobula.sbatch"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
VERSION = "1.31"
CRD = (
    Path(__file__).parent / "kuberay_1_7_0_rayjob.json.gz"
)  # schema of ray.io/v1 RayJob, descriptions and status left out


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def patched(overlay: str) -> Any:
    """The RayJob of an overlay: its JSON patches, which are all `replace`, applied to the base."""
    job = read(KUBERNETES / "base" / "rayjob.yaml")
    for patch in read(KUBERNETES / overlay / "kustomization.yaml").get("patches", []):
        for change in yaml.safe_load(patch["patch"]):
            assert change["op"] == "replace"
            *way, last = change["path"].strip("/").split("/")
            place = job
            for part in way:
                place = place[int(part)] if isinstance(place, list) else place[part]
            assert last in place, change["path"]
            place[last] = change["value"]
    return job


def config_of(entrypoint: str) -> RunConfig:
    python, dash, module, command, *words = shlex.split(entrypoint)
    assert (python, dash, module, command) == ("python", "-m", "mobula.deploy.cli", "train")
    return load_config(words)


@pytest.mark.parametrize("overlay", ["eight_gpu_split", "multi_node"])
def test_the_cluster_of_a_job_has_the_gpus_of_its_preset(overlay: str) -> None:
    job = patched(overlay)
    config = config_of(job["spec"]["entrypoint"])
    assert config.resources.preset == overlay and config.resume == "auto" and config.folder.is_absolute()
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = sum(
        group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
        for group in groups
        for container in group["template"]["spec"]["containers"]
    )
    assert gpus == sum(role.num_workers * role.num_gpus for role in config.resources.roles.values())
    assert all(group["replicas"] == group["minReplicas"] == group["maxReplicas"] for group in groups)


def test_pods_share_a_volume_have_shared_memory_and_the_time_to_end() -> None:
    spec = read(KUBERNETES / "base" / "rayjob.yaml")["spec"]
    claim = read(KUBERNETES / "base" / "shared-volume.yaml")["metadata"]["name"]
    stop_wait = int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert stop_wait >= config_of(spec["entrypoint"]).timeouts.stop_checkpoint_s + CLOSE_S
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert pod["terminationGracePeriodSeconds"] > stop_wait
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
    assert cluster["authOptions"]["mode"] == "token"


def test_slurm_leaves_a_run_the_time_to_write_its_checkpoint_and_to_end() -> None:
    [signal] = [line for line in SBATCH.read_text().splitlines() if line.startswith("#SBATCH --signal=B:TERM@")]
    seconds = int(signal.partition("@")[2])
    assert seconds >= load_config(["experiment=digits"]).timeouts.stop_checkpoint_s + CLOSE_S


def refusing_unknown(schema: Any) -> Any:
    """The same schema, in which a field that it does not name is an error; Kubernetes drops such fields."""
    if isinstance(schema, list):
        return [refusing_unknown(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: refusing_unknown(part) for key, part in schema.items()}
    has_fields = found.get("type") == "object" and isinstance(found.get("properties"), dict)
    return {"additionalProperties": False, **found} if has_fields else found


@pytest.fixture(scope="module")
def crd() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(refusing_unknown(json.loads(gzip.decompress(CRD.read_bytes()))))


@pytest.mark.parametrize("overlay", ["eight_gpu_split", "multi_node"])
def test_a_job_fits_the_schema_of_kuberay(overlay: str, crd: jsonschema.Draft7Validator) -> None:
    job = patched(overlay)
    assert [error.message for error in crd.iter_errors(job)] == []
    job["spec"]["shutdownAfterJobFinish"] = True  # an s is missing
    job["spec"]["backoffLimit"] = "three"
    found = {error.message for error in crd.iter_errors(job)}
    assert len(found) == 2 and any("'shutdownAfterJobFinish' was unexpected" in message for message in found)


def test_pods_and_the_volume_are_valid() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes_validate.validate(read(KUBERNETES / "base" / "shared-volume.yaml"), VERSION, strict=True)
    cluster = read(KUBERNETES / "base" / "rayjob.yaml")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**pod, "spec": {**pod["spec"], "continers": []}}, VERSION, strict=True)


def test_the_batch_script_is_valid_bash_and_never_stops_all_of_ray() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    commands = [line for line in SBATCH.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert not any("ray stop" in line or '/ray" stop' in line for line in commands)
    assert any("resume=auto" in line for line in commands)


@pytest.mark.parametrize(("tool", "path"), [("shellcheck", SBATCH), ("hadolint", DOCKERFILE)])
def test_linters_find_nothing(tool: str, path: Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_holds_every_package() -> None:
    copied = {line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")}
    assert {"configs", "cluster", "actors", "learner", "rewards", "deploy", "examples", "pyproject.toml"} <= copied


def test_the_cluster_launcher_starts_ray_from_the_environment() -> None:
    found = read(DEPLOY / "ray-vm" / "cluster.yaml")
    for commands in (found["head_start_ray_commands"], found["worker_start_ray_commands"]):
        assert all("/opt/mobula/.venv/bin/ray start" in command for command in commands)


SKY = DEPLOY / "skypilot" / "mobula.yaml"
SKY_KEYS = {"name", "num_nodes", "resources", "envs", "file_mounts", "run"}  # of a SkyPilot task that are used here


def test_the_skypilot_task_runs_what_the_configuration_accepts(tmp_path: Path) -> None:
    task = read(SKY)
    assert set(task) == SKY_KEYS
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\n" + task["run"])
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is not None:
        done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert "ray stop" not in task["run"]
    _, _, command = task["run"].partition('RAY_ADDRESS="$head:$port" python -m mobula.deploy.cli train ')
    known = {**task["envs"], "head": "10.0.0.1", "port": "1"}
    words = [Template(word).substitute(known) for word in shlex.split(command.replace("\\\n", " "))]
    config = load_config(words)
    assert config.resume == "auto" and config.folder.is_absolute() and config.data.path.is_absolute()
    nodes = described_nodes(f"{task['num_nodes']}x{task['resources']['accelerators'].split(':')[1]}x80GB")
    plan_placement(config.resources, [node.resources for node in nodes], needed_roles(config))
    assert "/shared" in task["file_mounts"]
