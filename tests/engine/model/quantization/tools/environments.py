"""An environment for each tool that packs checkpoints, with torch and `transformers` of the tests' own.

python -m tests.engine.model.quantization.tools.environments [NAME...]        installs those that are missing

They lie in $BATON_TOOLS, by default ~/.cache/baton/tools; delete one to install another release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.environments import Environment

_DATASETS = ("accelerate", "datasets", "dill", "multiprocess", "pandas", "psutil", "xxhash")
# Tool → the packages that pip installs for it, without their dependencies.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "compressed_tensors": ("compressed-tensors==0.20.0", "loguru", "psutil"),
    "gptq": (
        "gptqmodel==7.7.0",
        *_DATASETS,
        *("defuser", "device-smi", "logbar", "pypcre", "tokenicer", "threadpoolctl"),
    ),
    "awq": ("autoawq==0.2.9", *_DATASETS, "zstandard"),
    "modelopt": ("nvidia-modelopt==0.47.0", "ninja", "nvidia-ml-py", "omegaconf", "pulp", "setuptools"),
    "fbgemm": ("fbgemm-gpu-genai==1.9.0",),
    "transformers": ("accelerate", "psutil"),
}


def environment_of(tool: str) -> Environment:
    """The place where the tool is, or will be, installed."""
    cache = os.environ.get("BATON_TOOLS") or Path.home() / ".cache" / "baton" / "tools"
    return Environment(Path(cache) / tool, PACKAGES[tool], borrows=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print(name, environment_of(name).version)
