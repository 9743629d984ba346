"""Every example of docs/api.md runs as it is written, except for the addresses and the model's name."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from baton.v1.router_pb2 import GenerateRequest, ListModelsRequest
from tests.e2e.support.cluster import MODEL, Cluster

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
_NAMES = re.compile(r'"(baton-demo|NAME)"')
_HTTP = re.compile(r"(localhost|127\.0\.0\.1):8000")
_GRPC = "127.0.0.1:50051"


def blocks(language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    """Each command of the page's consoles that starts this program, which may have several lines."""
    lines = [line for block in blocks("console") for line in re.split(r"^\$ ", block, flags=re.MULTILINE)]
    return [line.strip() for line in lines if line.startswith(f"{program} ")]


PYTHON, CURL, GRPCURL = list(blocks("python")), commands("curl"), commands("grpcurl")


def on(cluster: Cluster, text: str) -> str:
    """The text with this cluster's addresses and model."""
    http = cluster.url.removeprefix("http://")
    return _HTTP.sub(http, _NAMES.sub(f'"{MODEL}"', text)).replace(_GRPC, cluster.grpc_address)


def test_the_page_has_examples_of_each_kind() -> None:
    assert (len(PYTHON) >= 4, len(CURL) >= 6, len(GRPCURL) >= 2) == (True, True, True)
    consoles = sum(block.count("\n$ ") + block.startswith("$ ") for block in blocks("console"))
    assert consoles == len(CURL) + len(GRPCURL)


@pytest.mark.parametrize("source", PYTHON, ids=range(len(PYTHON)))
def test_python(cluster: Cluster, source: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(on(cluster, source), "docs/api.md", "exec"), {})
    assert ("print" in source) == bool(printed.getvalue())


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", CURL, ids=range(len(CURL)))
def test_curl(cluster: Cluster, command: str) -> None:
    shown = subprocess.run(
        ["bash", "-c", on(cluster, command)], capture_output=True, text=True, timeout=60, check=True
    )
    if '"stream": true' in command:
        assert shown.stdout.rstrip().endswith("data: [DONE]")
        assert "error" not in shown.stdout
    else:
        assert "error" not in json.loads(shown.stdout) or json.loads(shown.stdout)["error"] is None


@pytest.mark.parametrize("command", GRPCURL, ids=range(len(GRPCURL)))
async def test_grpcurl(cluster: Cluster, command: str) -> None:
    """The command is run by grpcurl where there is one; otherwise a stub sends the same message."""
    command = on(cluster, command)
    if shutil.which("grpcurl") is not None:
        ran = await asyncio.create_subprocess_exec("bash", "-c", command)
        assert await asyncio.wait_for(ran.wait(), 60) == 0
        return
    asked = re.search(r"-d '(.*?)'", command, re.DOTALL)
    async with cluster.stub() as stub:
        if asked is None:
            assert command.endswith("RouterService/ListModels")
            assert [one.id for one in (await stub.ListModels(ListModelsRequest())).models] == [MODEL]
            return
        request = json_format.Parse(asked[1], GenerateRequest())
        responses = [response async for response in stub.Generate(request, timeout=60)]
        assert responses[-1].HasField("usage")
