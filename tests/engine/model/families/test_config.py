from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import baton
from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.source import resolve_model
from baton.model_spec.split import Split
from tests.engine.model.quantization.packing import compressed
from tests.support.checkpoints import CONFIGS, END_ID, FAMILIES, MIXTURES, Case

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LLAMA_DIGEST = "3e23b445dc1f4ce7d39b7a7e11e0aa3c499b5f302c29c30370a944208d628f52"
YARN = {"rope_type": "yarn", "factor": 4.0}


LAYER_TYPES = ("full_attention", "sliding_attention")
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}


def load(folder: Path, **changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return load_config(folder)


@pytest.mark.parametrize("case", [*FAMILIES, *MIXTURES], ids=str)
def test_reads_what_transformers_writes(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path)
    config, theirs = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert config.family == case.family
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (config.head_dim, config.num_kv_heads) == (head_dim, theirs.num_key_value_heads)
    assert config.num_layers == len(config.layer_windows) == theirs.num_hidden_layers
    assert config.eos_token_ids == (END_ID,)
    assert config.dtype == "float32"
    parameters = theirs.rope_parameters
    by_type = [parameters] if "rope_type" in parameters else list(map(parameters.get, LAYER_TYPES))
    found = [(rope.type, rope.theta) for rope in config.ropes]
    assert found == [(theirs["rope_type"], theirs["rope_theta"]) for theirs in by_type]
    assert config.tied_head == theirs.tie_word_embeddings


def test_old_and_new_keys_give_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = load(
        tmp_path,
        rope_theta=5e5,
        rope_scaling={"type": "llama3", "original_max_position_embeddings": 512, **scaling},
        torch_dtype="bfloat16",
    )
    new = load(
        tmp_path,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 512,
            **scaling,
        },
        dtype="bfloat16",
    )
    assert old == new
    assert old.digest() == new.digest()
    assert (new.rope.theta, new.rope.original_max_positions, new.dtype) == (5e5, 512, "bfloat16")


def test_an_empty_rope_scaling_hides_no_rope_parameters(tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    config = load(tmp_path, model_type="llama", rope_scaling={}, rope_parameters=parameters)
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    found = config.rope
    assert (found.type, found.theta, found.factor) == ("linear", 5e5, 4.0)
    assert (found.type, found.theta, found.factor) == tuple(theirs[key] for key in parameters)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        ("llama", {"sliding_window": 16}),
        ("gemma3", {"sliding_window": 16}),
        ("gemma3", {"sliding_window": 16, "sliding_window_pattern": 2}),
    ],
)
def test_windows_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    architecture = f"{family.capitalize()}ForCausalLM"
    config = load(tmp_path, architectures=[architecture], **changes)
    theirs = CONFIGS[family](**{**LLAMA, **changes})
    types = getattr(theirs, "layer_types", None)
    if family == "llama":
        expected = [None] * 4
    elif types is None:
        expected = [theirs.sliding_window] * 4
    else:
        expected = [theirs.sliding_window if t == "sliding_attention" else None for t in types]
    assert list(config.layer_windows) == expected


def test_generation_config_names_the_end_ids(tmp_path: Path) -> None:
    assert load(tmp_path, eos_token_id=7).eos_token_ids == (7,)
    assert load(tmp_path).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3, 9]}')
    assert load(tmp_path, eos_token_id=7).eos_token_ids == (3, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load(tmp_path, eos_token_id=7).eos_token_ids == (7,)


def test_layout_has_one_group_a_window(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=3,
    )
    full, windowed = config.layout(32, "bfloat16").groups
    assert (full.layers, full.window) == ((0, 1, 2), None)
    assert (windowed.layers, windowed.window) == ((3,), 16)
    assert [(p.name, p.heads, p.dim) for p in full.planes] == [("k", 2, 16), ("v", 2, 16)]
    assert full.block_bytes == 3 * 2 * 2 * 32 * 16 * 2
    assert config.of_rank(Split(1, 2)).layout(32, "bfloat16").groups[0].planes[0].heads == 1


def test_the_digest_differs_by_configuration(tmp_path: Path) -> None:
    config = load(tmp_path)
    digests = {config.digest()}
    for change in (
        {"vocab_size": 321},
        {"rms_norm_eps": 1e-5},
        {"rope_theta": 9e3},
        {"attention_bias": True},
    ):
        digests.add(load(tmp_path, **change).digest())
    assert len(digests) == 5
    assert dataclasses.replace(config).digest() == config.digest()


def test_the_digest_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Workers of two releases exchange blocks: what is new for one family may not change the others'
    digests."""
    assert load(tmp_path).digest().hex() == LLAMA_DIGEST


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": "absent"}, "architectures"),
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 65}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_token_id": 320}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"quantization_config": {"bits": 4}}, "quant_method"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "bits"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}},
            "checkpoint_format",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "version"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "quant_algo"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
        ({"quantization_config": compressed("pack-quantized", num_bits=8, type="int")}, "weights"),
        ({"quantization_config": compressed("nvfp4-pack-quantized", num_bits=4, type="float")}, "weights"),
        ({"quantization_config": compressed("int-quantized", ignore=("re:(",), num_bits=8)}, "ignore"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {**YARN, "factor": -1}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked"] * 4,
            },
            "layer_types",
        ),
    ],
)
def test_refusals_name_file_and_key(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(BatonError) as caught:
        load(tmp_path, **changes)
    assert caught.value.kind is ErrorKind.INVALID
    assert f"config.json: {key}: " in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe"])
def test_a_missing_or_broken_file_is_refused(content: str | bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BatonError, match=r"config\.json: ") as caught:
        load_config(tmp_path)
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message


def test_a_folder_is_its_own_source_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for name in (str(tmp_path / "none"), str(tmp_path / "file"), "./none", "none"):
        with pytest.raises(BatonError) as caught:
            resolve_model(name)
        assert caught.value.kind is ErrorKind.INVALID


def test_reading_a_configuration_needs_no_torch() -> None:
    modules = "baton.engine.model.families.registry, baton.engine.model.source"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_older_files_of_gemma_name_both_ropes(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    new = load(
        tmp_path,
        **GEMMA3,
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    old = load(tmp_path, **GEMMA3, rope_scaling=scaling, rope_local_base_freq=2e4)
    assert old == new
    assert [(rope.type, rope.theta, rope.factor) for rope in old.ropes] == [
        ("linear", 1e6, 8.0),
        ("default", 2e4, 1.0),
    ]
    assert [old.rope_of(layer) for layer in range(old.num_layers)] == [1] * old.num_layers


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_activation": "gelu"},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
    ],
)
def test_what_gemma_may_not_have(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BatonError, match=next(iter(changes))) as caught:
        load(tmp_path, **GEMMA3, **changes)
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"partial_rotary_factor": 0.33}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_type"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "short_factor",
        ),
        ({"rope_scaling": {"type": "su", "short_factor": [0] * 8, "long_factor": [1.0] * 8}}, "short_factor"),
    ],
)
def test_what_phi_may_not_have(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(BatonError, match=key) as caught:
        load(tmp_path, architectures=["Phi3ForCausalLM"], **changes)
    assert caught.value.kind is ErrorKind.INVALID


def test_a_digest_has_the_factors_that_are_used(tmp_path: Path) -> None:
    """Keys of the two sets of factors are not alike: such workers must not exchange blocks."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"original_max_position_embeddings": 1024, "rope_scaling": scaling}
    config = load(tmp_path, architectures=["Phi3ForCausalLM"], **changes)
    assert config.for_context(10) == config.for_context(1024)
    assert config.for_context(1024).digest() != config.for_context(1025).digest()


@pytest.mark.parametrize(("name", "own"), [(r"gemma", "gemma3.py"), (r"phi-?3", "phi3.py")])
def test_a_family_is_named_in_its_module_and_the_registry_alone(name: str, own: str) -> None:
    root = Path(baton.__file__).parents[1]
    folders = ("baton", "services", "kvtransfer", "loadgen")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    naming = {path.name for path in files if re.search(name, path.read_text(), re.IGNORECASE)}
    assert naming == {own, "registry.py"}
