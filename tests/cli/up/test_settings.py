"""File, environment and flags become one configuration, and every mistake one line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from baton.base.errors import BatonError
from services.cli.common import extras
from services.cli.main import main
from services.cli.up.local_cluster import cluster_config, router_config, worker_configs
from tests.cli.up.loaded import load, worker


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("engine: {slots: 1, chunk_tokens: 64, block_tokens: 8}\nrouter: {http_port: 1234}\n")
    config = load(
        "-c", str(file), "--slots", "3", BATON_SLOTS="2", BATON_CHUNK_TOKENS="128", BATON_PORT="tcp://1"
    )
    assert (config.engine.slots, config.engine.chunk_tokens, config.engine.block_tokens) == (3, 128, 8)
    assert (config.router.http_port, config.router.grpc_port) == (1234, 50051)


def test_admin_ports_and_public_metrics() -> None:
    flags = ("--admin-host", "10.0.0.7", "--admin-grpc-port", "7", "--admin-http-port", "8")
    router = load(*flags, BATON_CLUSTER_SECRET="a secret of the environment").router
    assert (router.admin_host, router.admin_ports, router.public_metrics) == ("10.0.0.7", (7, 8), None)
    assert load("--public-metrics").router.public_metrics is True
    assert load("--public-metrics", "false").router.public_metrics is False
    assert load(BATON_PUBLIC_METRICS="true").router.public_metrics is True


def test_the_web_page_is_on_unless_told_otherwise() -> None:
    assert load().router.ui
    assert not load("--no-ui").router.ui
    assert not load(BATON_UI="false").router.ui
    assert load("--ui", BATON_UI="false").router.ui
    with pytest.raises(BatonError, match=r"an admin port on 10\.0\.0\.7 needs a cluster secret: set BATON_"):
        load("--admin-host", "10.0.0.7")


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
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("baton: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


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


def test_gpu_links_are_reserved_for_each_peer(tmp_path: Path) -> None:
    def links(*flags: str) -> dict[str, int | None]:
        workers = worker_configs(load("--prefill", "3", "--decode", "2", "--both", "1", *flags), tmp_path)
        return {worker.role: worker.engine.gpu_links for worker in workers}

    assert links() == {"prefill": 0, "decode": 3, "both": 0}
    assert links("--transport", "nccl") == {"prefill": 2, "decode": 3, "both": 0}
    assert set(links("--transport", "grpc").values()) == set(links("--kv-wire", "int8").values()) == {0}
    file = tmp_path / "baton.yaml"
    combined = load("--prefill", "1", "--both", "2", "--both-receives")
    assert {role: combined.engine_of(role).gpu_links for role in ("prefill", "both")} == {
        "prefill": 0,
        "both": 2,
    }
    assert load("--prefill", "1", "--both", "2").engine_of("both").gpu_links == 0
    file.write_text("engine: {gpu_links: 7}\n")
    assert set(links("-c", str(file)).values()) == {7}


def test_roles_have_devices_of_their_own(tmp_path: Path) -> None:
    def devices(*flags: str) -> dict[str, int]:
        workers = worker_configs(load("--prefill", "1", "--decode", "1", "--both", "1", *flags), tmp_path)
        return {worker.role: worker.engine.tensor_parallel for worker in workers}

    assert devices() == {"prefill": 1, "decode": 1, "both": 1}
    assert devices("--tensor-parallel", "2") == {"prefill": 2, "decode": 2, "both": 2}
    roles = ("--prefill-tensor-parallel", "4", "--tensor-parallel", "2")
    assert devices(*roles) == {"prefill": 4, "decode": 2, "both": 2}
    file = tmp_path / "baton.yaml"
    file.write_text("engine_of_role: {decode: {tensor_parallel: 8, slots: 3}}\n")
    assert devices("-c", str(file), *roles) == {"prefill": 4, "decode": 8, "both": 2}
    assert devices("-c", str(file), "--decode-tensor-parallel", "1")["decode"] == 1
    with pytest.raises(BatonError) as refused:
        devices("--prefill-tensor-parallel", "0")
    key = "engine_of_role.prefill.tensor_parallel (--prefill-tensor-parallel)"
    assert refused.value.message == f"{key} is '0': input should be greater than 0"


def test_several_devices_need_speculation_off_where_steps_could_have_drafts(tmp_path: Path) -> None:
    """Prefill workers ignore the setting."""

    def speculation(*flags: str) -> dict[str, tuple[int, str]]:
        workers = worker_configs(load("--speculation", "lookup", *flags), tmp_path)
        return {worker.role: (worker.engine.tensor_parallel, worker.engine.speculation) for worker in workers}

    apart = {"prefill": (4, "lookup"), "decode": (1, "lookup")}
    assert speculation("--prefill-tensor-parallel", "4") == apart
    assert speculation("--tensor-parallel", "4", "--decode-tensor-parallel", "1") == apart
    for role, flags in (("decode", ()), ("both", ("--both", "1"))):
        with pytest.raises(BatonError) as refused:
            speculation("--tensor-parallel", "4", *flags)
        why = f"tensor_parallel 4 needs speculation off so far in workers of role {role}, not lookup"
        assert refused.value.message == why


def test_off_in_a_file_is_a_value_and_not_false(tmp_path: Path) -> None:
    """Without quotes, as the table of settings has it. What is true or false takes the words, too."""
    file = tmp_path / "baton.yaml"
    file.write_text(
        "engine: {speculation: off, tune: off, mixed_steps: off, prefix_cache: No}\n"
        "engine_of_role: {decode: {speculation: off}}\nserved_model_name: yes\n"
    )
    settings = load("-c", str(file))
    engine = settings.engine_of("decode")
    assert (engine.speculation, engine.tune) == ("off", "off")
    assert (engine.mixed_steps, engine.prefix_cache) == (False, False)
    assert settings.served_model_name == "yes"


def test_false_is_off_where_a_setting_has_that_word(tmp_path: Path) -> None:
    """Programs that write YAML 1.1 write it so; true stands for none of its words, and false for no other."""
    file = tmp_path / "baton.yaml"
    file.write_text(
        "engine: {speculation: false, tune: false}\nengine_of_role: {decode: {speculation: false}}\n"
    )
    engine = load("-c", str(file)).engine_of("decode")
    assert (engine.speculation, engine.tune) == ("off", "off")
    for refused in ("speculation: true", "dtype: false"):
        file.write_text(f"engine: {{{refused}}}\n")
        with pytest.raises(BatonError, match=f"engine.{refused.split(':')[0]}"):
            load("-c", str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('cluster_secret_file: "a\\0b"', "cluster_secret_file has a NUL character"),
        ('model: "\\0"', "model has a NUL character"),
        ("[" * 5000, "FILE is nested too deeply"),
        ("engine: " + "{a: " * 5000, "FILE is nested too deeply"),
    ],
    ids=["path", "model", "lists", "mappings"],
)
def test_files_that_python_itself_refuses(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    with pytest.raises(BatonError) as refused:
        load("-c", str(file))
    assert refused.value.message == message.replace("FILE", str(file))


def test_what_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """No message between processes can have it."""
    with pytest.raises(BatonError, match="served_model_name is not UTF-8"):
        load(BATON_SERVED_MODEL_NAME="a\udcff")
    for command in (("up", "--model"), ("status",), ("drain",), ("pool", "switch"), ("keys", "revoke"), ()):
        with pytest.raises(SystemExit) as ended:
            main([*command, "\udcff"])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "not UTF-8" in line


def test_an_error_is_one_line_whatever_it_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("router:\n  admin_host: |\n    a line\n")
    for arguments in (("-c", str(file)), ("--admin-host", "a\nb"), ("--no\nflag",)):
        with contextlib.suppress(SystemExit):
            assert main(["up", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "\\n" in line


def test_baton_worker_has_transfer_flags() -> None:
    assert worker().transfer.transport == "auto"
    reported = worker("--transport", "nccl", "--role", "decode")
    assert (reported.transfer.transport, reported.engine.gpu_links) == ("nccl", 1)
    assert worker(BATON_TRANSPORT="ipc").transfer.transport == "ipc"


def test_who_supervises(tmp_path: Path) -> None:
    there = load("--ray-address", "10.0.0.1:6379", BATON_CLUSTER_SECRET="a-secret-of-the-tests")
    ours = cluster_config(there, tmp_path, "abc")
    assert (ours.ray_address, ours.cluster_id) == ("10.0.0.1:6379", "abc")
    for named in ("local", "none"):
        assert cluster_config(load("--ray-address", named), tmp_path, "abc").ray_address == named


@pytest.mark.parametrize(("installed", "address"), [(True, "local"), (False, "none")])
def test_a_local_ray_is_started_where_ray_is_installed_and_none_is_named(
    installed: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "installed", lambda name: installed or name != "ray")
    assert cluster_config(load(), tmp_path, "abc").ray_address == address


def test_fixed_ports_of_workers_count_up(tmp_path: Path) -> None:
    ports = ("--transfer-port", "7000", "--frames-port", "7100", "--worker-metrics-port", "9000")
    workers = worker_configs(load("--prefill", "2", "--decode", "3", *ports), tmp_path)
    decode = [worker.transfer for worker in workers if worker.role == "decode"]
    assert [transfer.transfer_port for transfer in decode] == [7000, 7001, 7002]
    assert [transfer.frames_port for transfer in decode] == [7100, 7101, 7102]
    assert [worker.metrics_port for worker in workers] == [9000, 9001, 9002, 9003, 9004]
    free = worker_configs(load("--prefill", "2", "--decode", "3"), tmp_path)
    assert {(worker.transfer.transfer_port, worker.transfer.frames_port) for worker in free} == {(0, 0)}
    assert {worker.metrics_port for worker in free} == {0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--transfer-port", "7000", "--frames-port", "7001"), "both need port 7001"),
        (("--transfer-port", "65535"), "too few ports"),
        (("--frames-port", "9002", "--worker-metrics-port", "9000"), "both need port 9002"),
    ],
)
def test_fixed_ports_that_meet_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(BatonError, match=message):
        load("--prefill", "1", "--decode", "2", *flags)


def test_kv_is_quantised_in_the_cache_or_on_the_wire(tmp_path: Path) -> None:
    workers = worker_configs(load("--kv-dtype", "fp8"), tmp_path)
    assert {worker.engine.kv_dtype for worker in workers} == {"fp8"}
    with pytest.raises(BatonError, match="kv_wire int8 is for a cache that kv_dtype fp8 does not quantise"):
        load("--kv-dtype", "fp8", "--kv-wire", "int8")
