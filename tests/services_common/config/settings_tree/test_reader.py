"""One order of sources for every command, and one line for each key, flag or variable that nothing reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from baton.base.errors import BatonError
from services.cli.main import main
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.listing import settings_of
from services.common.config.settings_tree.settings import Settings
from services.common.config.settings_tree.variables import is_service_link, unknown_variables
from services.common.config.settings_tree.views import ROUTER, SUPERVISE, UP, WORKER, WORKER_GROUP, View
from services.common.config.types import Role, StrictModel, setting


def read(view: View, *flags: str, file: Any = None, folder: Path, **env: str) -> Settings:
    parser = argparse.ArgumentParser()
    reader.add_flags(parser, view, file=False)
    words = list(flags)
    if file is not None:
        (folder / "baton.yaml").write_text(json.dumps(file))
        words += ["--config", str(folder / "baton.yaml")]
    return reader.read(view, parser.parse_args(words), env)


@pytest.mark.parametrize("view", [UP, WORKER])
def test_flags_variables_file_defaults(view: View, tmp_path: Path) -> None:
    file: dict[str, Any] = {"model": "m", "engine": {"slots": 4, "chunk_tokens": 4, "block_tokens": 4}}
    given = read(
        view, "--slots", "2", file=file, folder=tmp_path, BATON_SLOTS="3", BATON_CHUNK_TOKENS="3"
    ).engine
    assert (given.slots, given.chunk_tokens, given.block_tokens) == (2, 3, 4)
    assert (given.kv_blocks, read(view, "--model", "m", folder=tmp_path).engine.slots) == (None, None)


def test_a_command_has_defaults_of_its_own(tmp_path: Path) -> None:
    assert read(UP, folder=tmp_path).start_timeout_s == 600
    assert read(WORKER, "--model", "m", folder=tmp_path).start_timeout_s == 1800
    assert read(WORKER, file={"model": "m", "start_timeout_s": 7}, folder=tmp_path).start_timeout_s == 7


@pytest.mark.parametrize(
    ("view", "file", "message"),
    [
        (UP, {"slots": 4}, "unknown key slots (did you mean engine.slots?)"),
        (UP, {"engine": {"slot": 4}}, "unknown key engine.slot (did you mean engine.slots?)"),
        (UP, {"router": {"connections": {"idle_timeout": 1}}}, "router.connections.idle_timeout_s?"),
        (UP, {"colour": "red"}, "unknown key colour"),
        (UP, {"engine_slots": 4}, "unknown key engine_slots (did you mean engine.slots?)"),
        (UP, {"decode_tensor_parallel": 2}, "(did you mean engine_of_role.decode.tensor_parallel?)"),
        (UP, {"tensor_paralel": 2}, "unknown key tensor_paralel (did you mean engine.tensor_parallel?)"),
        (UP, {"tls": {"internal": {}}}, "unknown key tls.internal: baton up does not read it"),
        (ROUTER, {"engine": {}}, "unknown key engine: baton router does not read it"),
        (WORKER_GROUP, {"cluster_secret": "x"}, "cluster_secret: baton worker group does not read it"),
        (SUPERVISE, {"engine_of_role": {"decode": {"slotz": 1}}}, "unknown key engine.slotz (did you mean"),
        (SUPERVISE, {"engine_of_role": {"decode": {"weights_seed": 1}}}, "which is not a setting: random"),
        (UP, {"router": {"max_attempts": 5}}, "router.max_attempts, which is not a setting: it is 3: what"),
    ],
)
def test_a_key_that_is_not_read_is_refused(
    view: View, file: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BatonError) as refusal:
        read(view, file=file, folder=tmp_path)
    assert message in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("flags", "engine", "message"),
    [
        ((), {"draft_tokens": 8}, "engine.draft_tokens is 8: input should be less than or equal to 7"),
        ((), {"draft_tokens": 0}, "engine.draft_tokens is 0: input should be greater than or equal to 1"),
        (
            (),
            {"lookup_tokens": 63},
            "engine.lookup_tokens is 63: input should be greater than or equal to 64",
        ),
        (
            (),
            {"speculation": "eagle"},
            "engine.speculation (--speculation) is 'eagle': input should be 'off', 'lookup', 'table' or "
            "'auto'",
        ),
        (
            ("--speculation", "on"),
            {},
            "engine.speculation (--speculation) is 'on': input should be 'off', 'lookup', 'table' or 'auto'",
        ),
        (
            ("--speculation", "table"),
            {"lookahead_table_mb": 0},
            "speculation by table needs lookahead_table_mb: guesses come from nowhere else",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    flags: tuple[str, ...], engine: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BatonError) as refusal:
        read(UP, *flags, file={"engine": engine}, folder=tmp_path)
    assert message in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("one", [one for one in settings_of() if one.fixed], ids=lambda one: one.path)
def test_what_is_no_setting_is_refused_with_its_reason(one: Any, tmp_path: Path) -> None:
    value: Any = 1
    for part in reversed(one.path.split(".")):
        value = {part: value}
    with pytest.raises(BatonError) as refusal:
        read(UP, file=value, folder=tmp_path)
    assert refusal.value.message == f"unknown key {one.path}, which is not a setting: {one.fixed}"


def test_flags_of_a_role_set_its_key_in_engine_of_role(tmp_path: Path) -> None:
    file: dict[str, Any] = {
        "engine_of_role": {"prefill": {"slots": 3, "tensor_parallel": 2}, "decode": {"slots": 4}}
    }
    flag = ("--prefill-tensor-parallel", "8")
    variables = {"BATON_PREFILL_TENSOR_PARALLEL": "4", "BATON_DECODE_TENSOR_PARALLEL": "4"}
    given = read(UP, *flag, file=file, folder=tmp_path, **variables)
    engines = [given.engine_of(role) for role in get_args(Role)]
    assert [one.slots for one in engines] == [3, 4, None]
    assert [one.tensor_parallel for one in engines] == [8, 4, 1]
    assert read(UP, *flag, folder=tmp_path).engine_of("prefill").tensor_parallel == 8
    joining = {
        "model": "m",
        "cluster_secret_file": "s",
        "state": {"namespace": "n", "redis_url": "redis://r"},
    }
    supervised = read(SUPERVISE, *flag, file={**file, **joining}, folder=tmp_path)
    assert supervised.engine_of("prefill").tensor_parallel == 8


def test_roles_that_share_a_mapping_of_the_file_have_flags_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "baton.yaml").write_text("engine_of_role: {prefill: &one {slots: 3}, decode: *one}\n")
    parser = argparse.ArgumentParser()
    reader.add_flags(parser, UP, file=False)
    words = ["--config", str(tmp_path / "baton.yaml"), "--decode-tensor-parallel", "2"]
    given = reader.read(UP, parser.parse_args(words), {})
    assert given.engine_of_role == {"prefill": {"slots": 3}, "decode": {"slots": 3, "tensor_parallel": "2"}}


def test_a_section_of_roles_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    for wrong in ({"prefill": None}, [1], 3):
        with pytest.raises(BatonError, match="engine_of_role"):
            read(UP, "--prefill-tensor-parallel", "2", file={"engine_of_role": wrong}, folder=tmp_path)


def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["up", "--slot", "3"], "unrecognized argument --slot, did you mean --slots? (see baton up --help)"),
        (
            ["router", "-c", "f", "--http-prot=1"],
            "argument --http-prot, did you mean --http-port?",
        ),
        (["status", "--colour"], "unrecognized argument --colour (see baton status --help)"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        err = capsys.readouterr().err
        assert (ended.value.code, err.count("\n")) == (2, 1)
        assert message in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("BATON_ROUTER_SERVICE_PORT", "8000"),
        ("BATON_ROUTER_SERVICE_PORT_HTTP", "8000"),
        ("BATON_SERVICE_HOST", "10.0.0.1"),
        ("BATON_PORT", "tcp://10.0.0.1:8000"),
        ("BATON_ROUTER_PORT", "udp://10.0.0.1:53"),
        ("BATON_ROUTER_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("BATON_ROUTER_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("BATON_ROUTER_PORT_8000_TCP_PORT", "8000"),
        ("BATON_ROUTER_PORT_8000_TCP_PROTO", "tcp"),
        ("BATON_HTTP_PORT", "tcp://10.0.0.1:80"),
        ("BATON_PORT", "tcp://[fd00::1]:80"),
    ],
)
def test_variables_of_kubernetes_are_silent(name: str, value: str, tmp_path: Path) -> None:
    assert is_service_link(name, value)
    assert list(unknown_variables({name: value}, [])) == []
    assert read(UP, folder=tmp_path, **{name: value}) == read(UP, folder=tmp_path), "nor are they settings"


def test_an_unknown_variable_is_a_warning_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"BATON_SLOT": "1", "BATON_HTPP_PORT": "80", "OTHER": "1", "BATON_NAME": "n"}
    known = [one.variable for one in settings_of() if one.variable]
    assert list(unknown_variables(environment, known)) == [
        "the variable BATON_HTPP_PORT is not known and ignored (did you mean BATON_HTTP_PORT?)",
        "the variable BATON_SLOT is not known and ignored (did you mean BATON_SLOTS?)",
    ]
    monkeypatch.setenv("BATON_SLOT", "1")
    assert main(["up", "--model", "/nowhere"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("baton: warning: the variable BATON_SLOT is not known")
    assert len(lines) == 2, "the warning, and what is wrong"


def test_a_setting_is_listed_by_path_with_what_it_declares() -> None:
    class Section(StrictModel):
        size_mb: int | None = setting(None, "memory for it", flag=True)

    class Root(StrictModel):
        part: Section | None = None

    (one,) = settings_of(Root)
    assert (one.path, one.flag, one.variable, one.unit, one.default, one.who) == (
        "part.size_mb",
        "--size-mb",
        "BATON_SIZE_MB",
        "MB",
        "",
        "operators",
    )


def test_a_section_may_be_empty_wrong_or_replaced_as_a_whole(tmp_path: Path) -> None:
    assert read(UP, "--slots", "3", file={"engine": {}}, folder=tmp_path).engine.slots == 3
    with pytest.raises(BatonError, match="engine is 4: "):
        read(UP, "--slots", "3", file={"engine": 4}, folder=tmp_path)
    replaced = read(UP, "--auth", "none", file={"auth": {"api_keys_file": "keys"}}, folder=tmp_path).auth
    assert replaced is not None
    assert (replaced.none, replaced.api_keys_file) == (True, None)
