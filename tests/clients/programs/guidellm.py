"""GuideLLM: streamed completions, chats and responses, synchronous and concurrent; no request fails."""

import json
import pathlib
import subprocess
import sys

url, model, folder = sys.argv[1:]
program = pathlib.Path(sys.executable).with_name("guidellm")
ended = 0
for path, profile in (
    ("/v1/completions", "synchronous"),
    ("/v1/chat/completions", "concurrent,streams=4"),
    ("/v1/responses", "synchronous"),
):
    report = pathlib.Path("report.json").absolute()
    command = [program, "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},model={model},request_format={path}"]
    command += ["--profile", f"kind={profile}", "--constraint", "kind=max_requests,count=8"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"]
    command += [
        "--tokenizer",
        f"kind=huggingface_auto,model={folder}",
        "--output",
        f"kind=json,path={report}",
    ]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals
    ended += totals["successful"]
print(f"{ended} requests, none failed")
