"""Room for workers on Ray nodes."""

from __future__ import annotations

import pytest

from services.cluster.detached.rooms import MAX_PLACES, Node, find_room, first_free_place, gpu_share
from services.common.config.types import Role

GPU = {"GPU": 4.0, "baton-prefill": 1.0, "baton-decode": 3.0}


def chosen(
    role: Role, nodes: list[Node], placed: dict[str, list[Role]], *, on_gpu: bool = True
) -> str | None:
    node = find_room(role, nodes, placed, on_gpu=on_gpu)
    return node.id if node else None


def test_declared_room_is_filled_by_role_and_not_beyond() -> None:
    nodes = [Node("a", GPU), Node("b", GPU)]
    assert chosen("prefill", nodes, {}) == "a"
    assert chosen("prefill", nodes, {"a": ["prefill"]}) == "b"
    assert chosen("prefill", nodes, {"a": ["prefill"], "b": ["prefill"]}) is None
    assert chosen("decode", nodes, {"a": ["prefill"], "b": []}) == "a", "it completes a pair"
    assert chosen("decode", nodes, {"a": ["prefill", "decode"], "b": ["prefill"]}) == "b"
    assert chosen("decode", nodes, {"a": ["decode"] * 3, "b": ["decode"] * 3}) is None


@pytest.mark.parametrize(("role", "expected"), [("prefill", "p"), ("decode", "d"), ("both", None)])
def test_a_node_of_one_role_takes_no_other(role: Role, expected: str | None) -> None:
    nodes = [Node("d", {"GPU": 1.0, "baton-decode": 1.0}), Node("p", {"GPU": 1.0, "baton-prefill": 1.0})]
    assert chosen(role, nodes, {}) == expected


def test_room_that_is_not_declared_is_counted_in_gpus_or_cpus() -> None:
    head, gpus, cpus = Node("head", {}), Node("gpus", {"GPU": 2.0}), Node("cpus", {"CPU": 1.0})
    assert chosen("decode", [head, gpus, cpus], {}) == "gpus"
    assert chosen("decode", [head, gpus, cpus], {"gpus": ["decode", "prefill"]}) is None
    assert chosen("decode", [head, gpus, cpus], {}, on_gpu=False) == "cpus"
    assert chosen("decode", [head, cpus], {"cpus": ["both"] * MAX_PLACES}, on_gpu=False) is None
    shared = find_room("decode", [gpus], {"gpus": ["decode"] * 3}, on_gpu=True, gpu_workers=2)
    assert shared is gpus


@pytest.mark.parametrize(
    ("resources", "configured", "expected"),
    [
        (GPU, None, 1),
        ({"GPU": 1.0, "baton-prefill": 1.0, "baton-decode": 1.0}, None, 2),
        ({"GPU": 2.0, "baton-prefill": 1.0, "baton-decode": 2.0}, None, 2),
        (GPU, 3, 3),
        ({}, None, 1),
    ],
)
def test_workers_that_share_a_gpu(resources: dict[str, float], configured: int | None, expected: int) -> None:
    assert gpu_share(Node("a", resources), configured) == expected


def test_places_are_taken_from_the_first_on() -> None:
    assert [first_free_place(taken) for taken in ([], [0], [1, 2], [0, 1, 3])] == [0, 1, 0, 2]
