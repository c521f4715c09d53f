"""The manifests for clusters: linters accept them, and what they say of ftcomm is so."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from ftcomm.cli import commands
from ftcomm.settings import Settings

pytestmark = pytest.mark.protocol

HERE = Path(__file__).parents[2]
CLUSTER = HERE / "examples" / "cluster"
MANIFESTS = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_kubernetes_takes_the_manifests(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_the_manifests_fit_together() -> None:
    """Selectors, claims and numbers; a validator looks at one object at a time."""
    by_name = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in MANIFESTS}
    coordinator, training = by_name["Job", "ftcomm-coordinator"]["spec"], by_name["Job", "training"]["spec"]
    assert training["completionMode"] == "Indexed"  # no schema says which words there are
    service = by_name["Service", "ftcomm-coordinator"]["spec"]
    labels = [job["template"]["metadata"]["labels"] for job in (coordinator, training)]
    assert service["selector"].items() <= labels[0].items()
    assert not service["selector"].items() <= labels[1].items()
    policy = by_name["NetworkPolicy", "ftcomm"]["spec"]
    for selector in (policy["podSelector"], policy["ingress"][0]["from"][0]["podSelector"]):
        assert all(selector["matchLabels"].items() <= each.items() for each in labels)
    [volume] = coordinator["template"]["spec"]["volumes"]
    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in by_name
    env = {entry["name"]: entry for entry in training["template"]["spec"]["containers"][0]["env"]}
    assert env["FTCOMM_COORDINATOR"]["value"] == f"ftcomm-coordinator:{service['ports'][0]['port']}"
    command = coordinator["template"]["spec"]["containers"][0]["command"]
    assert {f"--replicas={training['completions']}", f"--port={service['ports'][0]['port']}"} <= set(command)
    assert env["FTCOMM_REPLICAS"]["value"] == str(training["completions"]) == str(training["parallelism"])
    settings = {name: entry.get("value", "1") for name, entry in env.items()}
    assert dataclasses.asdict(Settings.from_env(settings))["replicas"] == training["completions"]


def test_the_shell_takes_the_batch_script() -> None:
    script = str(CLUSTER / "slurm.sbatch")
    subprocess.run(["bash", "-n", script], check=True)
    linter = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([str(linter), script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_python_takes_the_driver() -> None:
    """Ray itself is not installed here."""
    ast.parse((CLUSTER / "ray_job.py").read_text())


@pytest.mark.parametrize("path", [*sorted(CLUSTER.iterdir()), HERE / "docs" / "cluster.md"], ids=lambda path: path.name)
def test_variables_and_options_are_those_that_there_are(path: Path) -> None:
    text = path.read_text()
    source = "".join(file.read_text() for file in (HERE / "ftcomm").rglob("*.py"))
    for name in set(re.findall(r"FTCOMM_[A-Z_]+[A-Z]", text)):
        assert f'"{name}"' in source, name
    for line in re.findall(r"ftcomm (?:coordinator|run|doctor)\b[^`\n#]*", text.replace("\\\n", " ")):
        command = commands.get_command(click.Context(commands), line.split()[1])
        assert command is not None
        options = {option for parameter in command.params for option in parameter.opts}
        found = set(re.findall(r"--[a-z][a-z-]+", line))
        assert found <= options, (line, found - options)
