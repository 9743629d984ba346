"""AIPerf: streamed chats, completions and responses; no request fails, and usage adds up."""

import json
import os
import pathlib
import subprocess
import sys

url, model, folder = sys.argv[1:]
program = pathlib.Path(sys.executable).with_name("aiperf")
# Its offline mode takes no folder for a tokenizer; with a folder it looks nothing up.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(name, None)
ended = 0
for kind in ("chat", "completions", "responses"):
    results = pathlib.Path(kind).absolute()
    command = [program, "profile", "--model", model, "--url", url, "--endpoint-type", kind, "--streaming"]
    command += ["--tokenizer", folder, "--request-count", "8", "--concurrency", "2"]
    command += ["--prompt-input-tokens-mean", "24", "--prompt-output-tokens-mean", "8"]
    command += ["--extra-inputs", "ignore_eos:true", "--output-artifact-dir", results, "--ui", "none"]
    subprocess.run(command, check=True)
    (export,) = results.rglob("profile_export_aiperf.json")
    report = json.loads(export.read_text())
    assert report["request_count"]["avg"] == 8, report["request_count"]
    assert not report.get("error_summary"), report["error_summary"]
    assert report["output_sequence_length"]["avg"] > 0
    ended += 8
print(f"{ended} requests, none failed")
