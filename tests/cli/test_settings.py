"""File, environment and flags become one configuration, and every mistake one line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton.cli import settings
from baton.cli.local_cluster import cluster_config, router_config, worker_configs
from baton.cli.main import main
from services.common.config import UpConfig


def load(*flags: str, **environment: str) -> UpConfig:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return settings.load(parser.parse_args(flags), environment)


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("engine: {slots: 1, chunk_tokens: 64, block_tokens: 8}\nrouter: {http_port: 1234}\n")
    config = load(
        "-c", str(file), "--slots", "3", BATON_SLOTS="2", BATON_CHUNK_TOKENS="128", BATON_PORT="tcp://1"
    )
    assert (config.engine.slots, config.engine.chunk_tokens, config.engine.block_tokens) == (3, 128, 8)
    assert (config.router.http_port, config.router.grpc_port) == (1234, 50051)


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16"])
def test_dtype_spellings(spelling: str) -> None:
    assert load("--dtype", spelling).engine.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ((), (1, 1, 0)),
        (("--both", "2"), (0, 0, 2)),
        (("--prefill", "2", "--decode", "3"), (2, 3, 0)),
        (("--prefill", "1", "--both", "1"), (1, 0, 1)),
    ],
)
def test_only_named_roles_once_one_is_named(flags: tuple[str, ...], counts: tuple[int, ...]) -> None:
    assert tuple(load(*flags).role_counts.values()) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enginee: {}", "unknown key enginee"),
        ("engine: {slotz: 4}", "unknown key engine.slotz"),
        ("engine: 4", "engine is 4: "),
        ("engine: {slots: 0}", "engine.slots (--slots) is 0: "),
        ("prefill: 3", "none does decode"),
        ("{prefill: 0, decode: 0}", "none does prefill"),
        ("[1, 2]", "must hold settings by name"),
        ("a: [", "is not valid YAML"),
        ("!!python/object/apply:os.system [true]", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    assert main(["up", "-c", str(file)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("baton: error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    "flags",
    [
        ["--slots", "many"],
        ["--dtype", "int3"],
        ["--http-port", "65536"],
        ["--model", "/no/such"],
        ["-c", "/no/such"],
    ],
)
def test_a_bad_flag_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [[], ["upp"], ["up", "--slot", "3"], ["worker", "--role", "cook", "--model", "."]]
)
def test_a_bad_command_line_is_one_line_and_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_lacks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text("{}")
    assert main(["up", "--model", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        "config.json is missing",
        "no .safetensors file (or use --weights random)",
    ]


def test_the_children_get_what_was_asked(tmp_path: Path) -> None:
    config = load("--prefill", "2", "--decode", "1", "--slots", "7", "--log-level", "debug")
    workers = worker_configs(config, tmp_path)
    assert [(worker.name, worker.role) for worker in workers] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
    ]
    assert {worker.engine.slots for worker in workers} == {7}
    router = router_config(config, tmp_path)
    assert (router.served_model_name, router.log_level) == (tmp_path.name, "debug")


def test_who_supervises(tmp_path: Path) -> None:
    ours = cluster_config(load("--ray-address", "10.0.0.1:6379"), tmp_path, "abc")
    assert (ours.ray_address, ours.cluster_id) == ("10.0.0.1:6379", "abc")
    assert cluster_config(load(), tmp_path, "abc").ray_address == "local"


def test_every_flag_names_a_setting() -> None:
    defaults = UpConfig().model_dump()
    for flag in settings.FLAGS:
        value: object = defaults
        for part in flag.path.split("."):
            assert isinstance(value, dict)
            assert part in value, flag
            value = value[part]
