"""GitHub's workflows: what they run exists, actions are pinned, and no job may do more than it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.release.version import FORM
from tests.deploy import tools
from tests.deploy.chart import case

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
NAMES = ("ci", "kind", "release")
# On GitHub's runners, besides what a step of the same job sets up.
OF_RUNNERS = {
    *("ct", "docker", "echo", "gh", "helm", "jq", "kind", "kubectl", "make"),
    *("cp", "diff", "grep", "mkdir", "printf", "python", "rm", "sed", "sort", "sudo", "tar", "tee"),
}
# What jobs may write; all others read at most.
MAY_WRITE = {
    ("release", "build"): {"packages", "id-token", "attestations"},
    ("release", "publish"): {"contents"},
}

Job = dict[str, Any]


def workflow(name: str) -> dict[Any, Any]:
    """A workflow's file, parsed from YAML."""
    parsed: dict[Any, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))
    return parsed


def steps(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Steps of a workflow, with the names of their jobs."""
    for job, about in workflow(name)["jobs"].items():
        for step in about.get("steps", ()):
            yield job, step


def commands(name: str) -> list[list[str]]:
    """The words of each command that a workflow runs; those of a pipe apart, redirections left in."""
    lines = [line for _, step in steps(name) for line in step.get("run", "").splitlines() if line]
    split = [shlex.split(line) for line in lines]
    found: list[list[str]] = []
    for words in split:
        found.append([])
        for word in words:
            if word == "|":
                found.append([])
            else:
                found[-1].append(word)
    return found


def test_all_workflows_are_tested() -> None:
    assert sorted(file.name for file in WORKFLOWS.iterdir()) == [f"{name}.yml" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_programs_that_are_run_exist(name: str) -> None:
    for program, *_ in commands(name):
        if "/" in program:
            assert os.access(ROOT / program, os.X_OK), program
        else:
            assert program in OF_RUNNERS, program


@pytest.mark.parametrize("name", NAMES)
def test_targets_modules_and_paths_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    seen = set()
    for program, *arguments in commands(name):
        if program == "make":
            seen.add(arguments[0])
            assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), arguments[0]
        elif program == "python":
            assert arguments[0] == "-m"
            seen.add(arguments[1])
            assert (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file(), arguments[1]
        for path in re.findall(r"(?<![\w/.])(?:tests|tools|deploy|baton)/[\w/.-]+", " ".join(arguments)):
            assert (ROOT / path).exists(), path
    wanted = {"ci": {"prove"}, "kind": set(), "release": {"release", "deploy.release.version"}}
    assert seen == wanted[name]
    for about in workflow(name)["jobs"].values():
        if "uses" in about:
            assert (ROOT / about["uses"]).is_file()


def test_ci_runs_all_that_must_pass() -> None:
    assert [".ci/run"] in commands("ci")
    ci, release = workflow("ci"), workflow("release")
    # YAML 1.1 reads the key `on` as true.
    assert {"pull_request", "push", "workflow_call"} == set(ci[True])
    assert release["jobs"]["build"]["needs"] == "ci"
    assert release["jobs"]["publish"]["needs"] == "build"


def test_kind_runs_the_chart_of_the_tests() -> None:
    """The images that are built are those that the chart names, and its own test is run."""
    rendered = case("cpu")
    for pod in ("router", "workers"):
        image = rendered.container(f"demo-baton-{pod}")["image"].rpartition(":")[0]
        assert any(f"{image}:$VERSION" in words for words in commands("kind") if words[0] == "docker"), image
        assert any(f"{image}:$VERSION" in words for words in commands("kind") if words[0] == "kind"), image
    (installed,) = [words for words in commands("kind") if words[:2] == ["helm", "install"]]
    assert "deploy/helm/baton/ci/cpu-values.yaml" in installed
    assert ["helm", "test"] in [words[:2] for words in commands("kind")]
    (linted,) = [words for words in commands("kind") if words[0] == "ct"]
    assert linted[1:4] == ["lint", "--charts", "deploy/helm/baton"]


def test_a_tag_of_a_version_makes_a_release() -> None:
    (pattern,) = workflow("release")[True]["push"]["tags"]
    assert pattern == "v[0-9]+.[0-9]+.[0-9]+"
    assert FORM.fullmatch("1.20.3")
    (made,) = [words for words in commands("release") if words[:2] == ["make", "release"]]
    assert made[2:] == ["VERSION=${GITHUB_REF_NAME#v}", "ARGS=--push $REGISTRY $KERNELS"]


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_by_digest_with_their_version(name: str) -> None:
    lines = (WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8").splitlines()
    used = [line for line in lines if "uses: " in line and "uses: ./" not in line]
    assert len(used) >= 4
    for line in used:
        assert re.fullmatch(r"\s*- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_one_action_has_one_version() -> None:
    text = "".join((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8") for name in NAMES)
    pins = set(re.findall(r"uses: ([\w-]+/[\w-]+)@(\w+ # \S+)", text))
    assert len(pins) == len({action for action, _ in pins})


@pytest.mark.parametrize("name", NAMES)
def test_jobs_may_write_only_what_they_make(name: str) -> None:
    about = workflow(name)
    assert about["permissions"] in ({}, {"contents": "read"})
    for job, made in about["jobs"].items():
        granted = made.get("permissions", about["permissions"])
        writes = {scope for scope, access in granted.items() if access == "write"}
        assert writes == MAY_WRITE.get((name, job), set()), job
        assert set(granted.values()) <= {"read", "write"}


@pytest.mark.parametrize("name", NAMES)
def test_jobs_end_and_no_value_of_a_caller_is_run(name: str) -> None:
    for job, about in workflow(name)["jobs"].items():
        assert "uses" in about or about["timeout-minutes"] <= 120, job
    for _, step in steps(name):
        assert "${{" not in step.get("run", "")
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


def test_what_is_attested_is_what_is_pushed() -> None:
    attested = [step["with"] for _, step in steps("release") if "attest" in step.get("uses", "")]
    names = {one["subject-name"].rpartition("}}/")[2] for one in attested if "subject-name" in one}
    assert names == {"baton-router", "baton-worker", "charts/baton"}
    outputs = {one["subject-digest"] for one in attested if "subject-digest" in one}
    assert outputs == {f"${{{{ steps.digests.outputs.{part} }}}}" for part in ("router", "worker", "chart")}
    assert {"subject-checksums": "dist/SHA256SUMS"} in attested


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_linters_find_nothing() -> None:
    files = [str(WORKFLOWS / f"{name}.yml") for name in NAMES]
    schema = [str(tools.check_jsonschema()), "--builtin-schema", "vendor.github-workflows", *files]
    security = [str(tools.zizmor()), "--offline", "--min-severity", "medium", *files]
    for command in (schema, security):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
