"""The manifests for clusters: linters accept them, and what they say of ftcomm is so."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from lightkube.models import apps_v1, batch_v1, core_v1, networking_v1

from ftcomm.cli import commands
from ftcomm.control.etcd import EtcdPlace
from ftcomm.settings import Settings
from tests.rigs.ports import free_port

pytestmark = pytest.mark.protocol

HERE = Path(__file__).parents[2]
CLUSTER = HERE / "examples" / "cluster"
MANIFESTS = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))


KINDS = {
    ("v1", "Service"): core_v1.Service,
    ("apps/v1", "StatefulSet"): apps_v1.StatefulSet,
    ("batch/v1", "Job"): batch_v1.Job,
    ("networking.k8s.io/v1", "NetworkPolicy"): networking_v1.NetworkPolicy,
}


def accepted(manifest: dict[str, Any]) -> None:
    """By the types of the API: raises on a field that there is not, of another type, or that is missing."""
    kind = KINDS[manifest["apiVersion"], manifest["kind"]]
    taken = msgspec.to_builtins(msgspec.convert(manifest, kind))
    unknown = sorted(leaves(manifest) - leaves(taken))
    assert not unknown, f"{manifest['kind']} has no {', '.join(unknown)}"


def leaves(part: Any, path: str = "") -> set[str]:
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return set().union(
        {path} if path else set(), *(leaves(below, f"{path}.{name}".strip(".")) for name, below in items)
    )


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_kubernetes_takes_the_manifests(manifest: dict[str, Any]) -> None:
    accepted(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "terminationGracePeriod"), 60),
        (("spec", "completions"), "four"),
        (("spec", "template", "spec", "containers", 0, "name"), None),
    ],
)
def test_a_manifest_with_a_slip_is_not_accepted(path: tuple[Any, ...], value: Any) -> None:
    manifest = copy.deepcopy(next(each for each in MANIFESTS if each["metadata"]["name"] == "training"))
    part = manifest
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    if value is None:
        del part[path[-1]]
    with pytest.raises((AssertionError, msgspec.ValidationError)):
        accepted(manifest)


def test_the_manifests_fit_together() -> None:
    """Selectors, claims and numbers; a validator looks at one object at a time."""
    by_name = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in MANIFESTS}
    coordinator, training = by_name["Job", "ftcomm-coordinator"]["spec"], by_name["Job", "training"]["spec"]
    assert training["completionMode"] == "Indexed"  # no schema says which words there are
    service = by_name["Service", "ftcomm-coordinator"]["spec"]
    labels = [part["template"]["metadata"]["labels"] for part in (coordinator, training)]
    assert service["selector"].items() <= labels[0].items()
    assert not service["selector"].items() <= labels[1].items()
    labels.append(by_name["StatefulSet", "ftcomm-etcd"]["spec"]["template"]["metadata"]["labels"])
    policy = by_name["NetworkPolicy", "ftcomm"]["spec"]
    for selector in (policy["podSelector"], policy["ingress"][0]["from"][0]["podSelector"]):
        assert all(selector["matchLabels"].items() <= each.items() for each in labels)
    etcd = by_name["StatefulSet", "ftcomm-etcd"]["spec"]
    assert (
        by_name["Service", "ftcomm-etcd"]["spec"]["selector"].items() <= etcd["template"]["metadata"]["labels"].items()
    )
    assert etcd["selector"]["matchLabels"].items() <= etcd["template"]["metadata"]["labels"].items()
    [claim], [container] = etcd["volumeClaimTemplates"], etcd["template"]["spec"]["containers"]
    [mount] = container["volumeMounts"]
    assert mount["name"] == claim["metadata"]["name"]
    assert f"--data-dir={mount['mountPath']}/etcd" in container["command"]
    env = {entry["name"]: entry for entry in training["template"]["spec"]["containers"][0]["env"]}
    assert env["FTCOMM_COORDINATOR"]["value"] == f"ftcomm-coordinator:{service['ports'][0]['port']}"
    command = coordinator["template"]["spec"]["containers"][0]["command"]
    assert {f"--replicas={training['completions']}", f"--port={service['ports'][0]['port']}"} <= set(command)
    [store] = [option.partition("=")[2] for option in command if option.startswith("--store=")]
    [client] = by_name["Service", "ftcomm-etcd"]["spec"]["ports"]
    assert EtcdPlace.parse(store, {}).endpoints == (("ftcomm-etcd", client["port"]),)
    assert env["FTCOMM_REPLICAS"]["value"] == str(training["completions"]) == str(training["parallelism"])
    settings = {name: entry.get("value", "1") for name, entry in env.items()}
    assert dataclasses.asdict(Settings.from_env(settings))["replicas"] == training["completions"]


@pytest.mark.parametrize("name", ["training", "ftcomm-coordinator"])
def test_the_pod_of_a_node_that_is_gone_is_replaced(name: str) -> None:
    """Without waiting for its end, which nobody on that node can tell, and soon: by default after five minutes."""
    spec = next(each["spec"] for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == ("Job", name))
    assert spec["podReplacementPolicy"] == "TerminatingOrFailed"
    assert spec["backoffLimit"] >= 1000, "a pod that is given up counts as a failure"
    given_up = {each["key"]: each for each in spec["template"]["spec"]["tolerations"]}
    for state in ("unreachable", "not-ready"):
        toleration = given_up[f"node.kubernetes.io/{state}"]
        assert (toleration["operator"], toleration["effect"]) == ("Exists", "NoExecute")
        assert toleration["tolerationSeconds"] <= 30


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-run.sbatch"])
def test_the_shell_takes_the_batch_scripts(name: str) -> None:
    script = str(CLUSTER / name)
    subprocess.run(["bash", "-n", script], check=True)
    linter = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([str(linter), script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


# What the driver needs of Ray, which is not installed here: tasks, as threads that may end by an exception.
RAY = """
import concurrent.futures, types

util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
pool = concurrent.futures.ThreadPoolExecutor(16)

def init():
    pass

def remote(*, max_retries, retry_exceptions):
    def options(task, *, num_gpus):
        assert num_gpus == 0, "never scheduled on a node without"
        return types.SimpleNamespace(remote=lambda *arguments: pool.submit(task, *arguments))
    return lambda task: types.SimpleNamespace(options=lambda **given: options(task, **given))

def get(tasks):
    return [task.result() for task in tasks]
"""

SCRIPT = """
import sys
import numpy as np
import ftcomm

group = ftcomm.init()
array = np.full(4, 2.0**group.replica)
ftcomm.allreduce(array)
sys.stdout.write(f"replica {group.replica}: {array[0]:g}\\n")
"""


def test_the_driver_for_ray_runs_a_job(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}
    command = [sys.executable, CLUSTER / "ray_job.py", "--replicas", "3", "--gpus", "0"]
    command += ["--port", str(free_port()), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"replica {replica}: 7" for replica in range(3)} <= set(done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("path", [*sorted(CLUSTER.iterdir()), HERE / "docs" / "cluster.md"], ids=lambda path: path.name)
def test_variables_and_options_are_those_that_there_are(path: Path) -> None:
    text = path.read_text()
    source = "".join(file.read_text() for part in ("ftcomm", "control") for file in (HERE / part).rglob("*.py"))
    for name in set(re.findall(r"FTCOMM_[A-Z_]+[A-Z]", text)):
        assert f'"{name}"' in source, name
    for line in re.findall(r"ftcomm (?:coordinator|run|doctor)\b[^`\n#]*", text.replace("\\\n", " ")):
        command = commands.get_command(click.Context(commands), line.split()[1])
        assert command is not None
        options = {option for parameter in command.params for option in parameter.opts}
        found = set(re.findall(r"--[a-z][a-z-]+", line))
        assert found <= options, (line, found - options)
