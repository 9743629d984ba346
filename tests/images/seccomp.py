"""The filter of system calls that RuntimeDefault stands for, as an OCI runtime reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Of the package golang-github-containers-common, which buildah brings; CRI-O takes it for RuntimeDefault.
PROFILE = Path("/usr/share/containers/seccomp.json")
_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32")
_ARCHITECTURE = "amd64"

Rule = dict[str, Any]


def runtime_default(profile: Path = PROFILE) -> Rule:
    """The filter of a container without capabilities on x86-64."""
    written = json.loads(profile.read_text(encoding="utf-8"))
    return {
        "defaultAction": written["defaultAction"],
        "defaultErrnoRet": written["defaultErrnoRet"],
        "architectures": list(_ARCHITECTURES),
        "syscalls": [_rule(rule) for rule in written["syscalls"] if applies(rule)],
    }


def applies(rule: Rule) -> bool:
    """True if a rule of the profile is for such a container. Raises AssertionError for an unknown
    condition."""
    included, excluded = rule.get("includes") or {}, rule.get("excludes") or {}
    unknown = {*included, *excluded} - {"arches", "caps"}
    assert not unknown, f"unknown conditions {unknown}"
    architectures = included.get("arches") or [_ARCHITECTURE]
    return (
        _ARCHITECTURE in architectures
        and _ARCHITECTURE not in (excluded.get("arches") or [])
        and not included.get("caps")
    )


def _rule(rule: Rule) -> Rule:
    made: Rule = {"names": rule["names"], "action": rule["action"]}
    if rule.get("errnoRet") is not None:
        made["errnoRet"] = rule["errnoRet"]
    if rule.get("args"):
        made["args"] = rule["args"]
    return made
