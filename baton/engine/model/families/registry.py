"""The architectures that are served, each with the function that reads its `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.gemma3 import gemma3
from baton.engine.model.families.llama import llama, mistral, qwen2, qwen3
from baton.engine.model.families.mixtures import mixtral, qwen3_moe
from baton.engine.model.families.phi3 import phi3
from baton.model_spec.model_files import ConfigFile

FAMILIES: dict[str, Callable[[ConfigFile], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma3ForCausalLM": gemma3,
    "Phi3ForCausalLM": phi3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
}


def load_config(folder: str | Path) -> ModelConfig:
    """Reads `config.json` and, for the end-of-sequence ids, `generation_config.json` if there is one.

    Raises BatonError(INVALID) with one line that names file and key.
    """
    file = ConfigFile.read(Path(folder) / "config.json")
    names = file.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise file.error("architectures", f"expected one of {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise file.error("architectures", f"{names[0]} is not supported (supported: {', '.join(FAMILIES)})")
    return FAMILIES[names[0]](file)
