"""Room for workers on Ray nodes, and which of them is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cluster.on_ray.rooms import MAX_PLACES, Node, declared, find_room, first_free_place
from services.common.config.types import Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
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


def test_places_are_taken_from_the_first_on() -> None:
    assert [first_free_place(taken) for taken in ([], [0], [1, 2], [0, 1, 3])] == [0, 1, 0, 2]


def test_a_pair_shares_a_node_and_the_next_takes_another() -> None:
    nodes, placed = [Node("a", {"GPU": 2.0}), Node("b", {"GPU": 2.0})], dict[str, list[Role]]()
    for role in ("prefill", "decode", "prefill", "decode"):
        where = chosen(role, nodes, placed)
        assert where is not None
        placed.setdefault(where, []).append(role)
    assert placed == {"a": ["prefill", "decode"], "b": ["prefill", "decode"]}


def test_a_silent_node_is_the_last_choice_but_is_one() -> None:
    nodes = [Node("a", {"CPU": 1.0}), Node("b", {"CPU": 1.0})]
    beside = find_room("decode", nodes, {"b": ["decode", "decode"]}, on_gpu=False, silent=["a"])
    assert beside is nodes[1]
    assert find_room("decode", nodes[:1], {}, on_gpu=False, silent=["a"]) is nodes[0]


def test_a_node_can_declare_that_it_runs_no_workers() -> None:
    """The node's resource has any name but a role's, since Ray drops resources of 0."""
    node = Node("a", {"CPU": 8.0, "GPU": 8.0, "baton-none": 1.0})
    assert [chosen(role, [node], {}, on_gpu=on_gpu) for role in ROLES for on_gpu in (True, False)] == [
        None
    ] * 6


def test_what_is_declared_is_found() -> None:
    node = Node("a", declared({"prefill": 1, "both": 2}))
    assert node.declared == {"prefill": 1, "both": 2}
    assert chosen("both", [node], {"a": ["both"]}) == "a"
    assert chosen("decode", [node], {}) is None


def test_room_is_counted_in_gpus_of_each_role() -> None:
    """Decode workers of two GPUs, prefill workers of one."""
    node, devices = Node("a", {"GPU": 4.0}), {"decode": 2}

    def fits(role: Role, *here: Role) -> bool:
        return find_room(role, [node], {"a": here}, on_gpu=True, devices=devices) is not None  # type: ignore[arg-type]

    assert fits("decode", "decode")
    assert fits("decode", "prefill", "prefill")
    assert not fits("decode", "decode", "prefill")
    assert fits("prefill", "decode", "prefill")
    assert not fits("prefill", "decode", "decode")
    devices["decode"] = 8
    assert not fits("decode")


@given(
    roles=st.lists(st.sampled_from(ROLES), max_size=20),
    gpus=st.lists(st.integers(0, 4), max_size=4),
    gpu_workers=st.integers(1, 3),
)
def test_gpus_are_filled_and_never_beyond_their_shares(
    roles: list[Role], gpus: list[int], gpu_workers: int
) -> None:
    nodes = [Node(str(index), {"CPU": 1.0, "GPU": float(count)}) for index, count in enumerate(gpus)]
    placed: dict[str, list[Role]] = {}
    for role in roles:
        node = find_room(role, nodes, placed, on_gpu=True, gpu_workers=gpu_workers)
        if node is not None:
            placed.setdefault(node.id, []).append(role)
    assert sum(map(len, placed.values())) == min(len(roles), sum(gpus) * gpu_workers)
    assert all(len(here) <= gpus[int(node)] * gpu_workers for node, here in placed.items())
