"""Text that repeats itself as often as is wanted, models that write it, and vLLM on them.

    python -m bench.markov_text FOLDER [--shape llama-3.1-8b] [--dtype bf16] [--text markov:0.8] [--device D]
    python -m bench.markov_text FOLDER --vllm [--shape llama-3.1-8b] [--text markov:0.7,markov:0.9]
        [--batch 1,8,64] [--drafts 0,3,7] [--context 1024] [--method ngram_gpu] [--options JSON]

A token of a cycle of 128 ids is followed by its successor with the given chance, else by any of them. The
first command writes a checkpoint of that shape which draws so at temperature 1, for engines that read one
(16 GB for 8B): random weights, except embedding and head. Prompts of the same chain come from `chain`, which
needs Python alone. A lookup's drafts are right less often than the chance says, since it must find the place
first: text of 1,024 tokens and more makes about 1.5, 1.9 and 3.0 tokens a step with 7 drafts at chances of
0.7, 0.8 and 0.9.

--vllm: the time of a sequence's token of vLLM on such weights, with drafts and without, as `bench.decode
--text` measures it of Baton. Run by the Python that has vLLM, from the repository's root; FOLDER gets a
configuration alone, since vLLM's workers draw the weights. Its n-gram proposer looks up matches of 2 to 8
tokens. Sequences have prompts of their own, which no run sends again; time is the difference of outputs of
160 and of 32 tokens, the median of three runs. A JSON object a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CYCLE = 128
# The embedding's magnitude: far more than what all layers add to it, so that the head still sees the token.
_MAGNITUDE = 256.0
# By how much ids outside the cycle lie below the least likely of it.
_OUTSIDE = 20.0
_SHARD_BYTES = 4 << 30
# Output tokens of vLLM's runs, and their number; matches of its proposer.
_SHORT, _LONG, _RUNS = 32, 160, 3
_MATCHES = {"prompt_lookup_min": 2, "prompt_lookup_max": 8}


def chance_of(text: str) -> float:
    """Reads "markov:0.8". Raises ValueError for anything else, and for chances that are not above 0 and
    below 1."""
    kind, _, number = text.partition(":")
    chance = float(number) if kind == "markov" and number else math.nan
    if not 0 < chance < 1:
        raise ValueError(f"text is markov:CHANCE, of a chance between 0 and 1, not {text!r}")
    return chance


def cycle_of(hidden: int) -> int:
    """Ids of the cycle that a model of that hidden size writes: 128, or half of the size if that is less."""
    return min(CYCLE, hidden // 2)


def chain(chance: float, length: int, seed: int, ids: int = CYCLE) -> list[int]:
    """Draws `length` tokens of a cycle of `ids`, the first one any of them."""
    draw = random.Random(seed)
    tokens = [draw.randrange(ids)]
    while len(tokens) < length:
        successor = (tokens[-1] + 1) % ids
        tokens.append(successor if draw.random() < chance else draw.randrange(ids))
    return tokens


def encode(weights: dict[str, Any], chance: float) -> None:
    """Makes the model that these weights are for, by their names in checkpoints, write such text. Raises
    ValueError where it cannot: its head is its embedding, or quantised.

    Embeddings are orthogonal states of the cycle's ids, each with a direction that all have in common; the
    head maps a state to its successor, and that direction to everything outside the cycle.
    """
    import torch

    embedding, head = weights["model.embed_tokens.weight"], weights.get("lm_head.weight")
    if not isinstance(head, torch.Tensor):
        raise ValueError("text of a known chance needs a head of its own, not quantised")
    vocab, hidden = embedding.shape
    ids = cycle_of(hidden)
    states = _orthogonal(ids + 1, hidden).to(embedding.device)
    common = states[ids]
    token_states = (_MAGNITUDE * (states[:ids] + common)).to(embedding.dtype)
    embedding.copy_(token_states[torch.arange(vocab, device=embedding.device) % ids])
    successor = chance + (1 - chance) / ids
    gain = math.log(successor * (ids - 1) / (1 - successor))
    # The final norm leaves a state's two directions with half of its square each.
    per_logit = math.sqrt(2) / hidden
    head.copy_((-_OUTSIDE * per_logit * common).expand_as(head))
    head[:ids] = (gain * per_logit * states[:ids].roll(1, 0)).to(head.dtype)


def _orthogonal(count: int, size: int) -> Tensor:
    """Vectors [count, size] whose elements have a mean square of 1."""
    import torch

    drawn = torch.randn(size, count, generator=torch.Generator().manual_seed(58))
    vectors: Tensor = torch.linalg.qr(drawn).Q.T
    return vectors.contiguous() * math.sqrt(size)


def write_checkpoint(
    folder: Path,
    shape: str,
    dtype: str,
    chance: float,
    device: str = "cuda",
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes `config.json` and the weights, random except those that encode the chain; `shard_bytes`: of a
    file, unless one weight is larger."""
    from bench.engine_driver import random_model
    from bench.shapes import SHAPES, Precision

    folder.mkdir(parents=True, exist_ok=True)
    precision = Precision(dtype)
    config = {**SHAPES[shape].config, "torch_dtype": precision.torch_dtype}
    (folder / "config.json").write_text(json.dumps(config))

    def save(weights: dict[str, Any]) -> None:
        encode(weights, chance)
        _save(folder, weights, shard_bytes)

    random_model(SHAPES[shape], precision, config["max_position_embeddings"], 64, device, save)


def _save(folder: Path, weights: dict[str, Any], shard_bytes: int) -> None:
    """Writes weights as safetensors of at most `shard_bytes` each, with their index."""
    from safetensors.torch import save_file

    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, weight in weights.items():
        if size + weight.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size += weight.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Tensors that lie in one piece of memory are copied apart.
        save_file({name: weight.cpu().clone() for name, weight in shard.items()}, folder / file)
        places |= dict.fromkeys(shard, file)
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def draw_weights(chance: float, model: Any) -> None:
    """Draws the weights of a module that has a checkpoint's names for embedding and head, for such text."""
    from bench.engine_driver import draw

    weights = {name: weight.data for name, weight in model.named_parameters()}
    draw(weights)
    encode(weights, chance)


def _longest(arguments: argparse.Namespace) -> int:
    """The most tokens of a sequence of vLLM's."""
    return int(arguments.context + 2 * _LONG)


class Peer:
    """vLLM with `drafts` drafts a step."""

    def __init__(self, drafts: int, arguments: argparse.Namespace) -> None:
        import torch
        import vllm

        speculative = {"method": arguments.method, "num_speculative_tokens": drafts, **_MATCHES}
        self._vllm, self._torch = vllm, torch
        self._model = vllm.LLM(
            model=str(arguments.folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=_longest(arguments),
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
            max_num_seqs=256,
            disable_log_stats=False,
            **({"speculative_config": speculative} if drafts else {}),
            **json.loads(arguments.options),
        )
        self._chance, self._context, self._seed = 0.0, arguments.context, 1 << 20

    def write(self, chance: float) -> None:
        """Has the model write text of that chance from now on."""
        self._model.apply_model(partial(draw_weights, chance))
        self._chance = chance
        self.run(4, _SHORT)

    def run(self, batch: int, output: int) -> float:
        """Seconds of a batch with prompts that were not sent before."""
        prompts = []
        for _ in range(batch):
            self._seed += 1
            prompts.append({"prompt_token_ids": chain(self._chance, self._context, self._seed)})
        sampling = self._vllm.SamplingParams(
            temperature=1.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        results = self._model.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        if any(len(result.outputs[0].token_ids) != output for result in results):
            raise RuntimeError(f"an output is not of {output} tokens")
        return took

    def token_ms(self, batch: int) -> list[float]:
        """Milliseconds of a sequence's token, of each run."""
        differences = [self.run(batch, _LONG) - self.run(batch, _SHORT) for _ in range(_RUNS)]
        return [difference / (_LONG - _SHORT) * 1e3 for difference in differences]

    def counted(self) -> dict[str, Any]:
        """vLLM's counts of drafts so far."""
        counts = {}
        for metric in self._model.get_metrics():
            if "spec_decode" in metric.name and hasattr(metric, "value"):
                counts[metric.name.rpartition(":")[2]] = metric.value
        return counts


def measure_vllm(arguments: argparse.Namespace) -> None:
    """Prints a line for each number of drafts, text and batch."""
    from bench.model_folders import write_random_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A function is sent to the workers.
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_random_model(arguments.folder, arguments.shape, _longest(arguments))
    for drafts in map(int, arguments.drafts.split(",")):
        peer = Peer(drafts, arguments)
        for text in arguments.text.split(","):
            peer.write(chance_of(text))
            print_times(peer, text, drafts, arguments)
        del peer
        gc.collect()


def print_times(peer: Peer, text: str, drafts: int, arguments: argparse.Namespace) -> None:
    """Prints a line for each batch; its counts are those of the batches before it as well."""
    for batch in map(int, arguments.batch.split(",")):
        times = peer.token_ms(batch)
        case = {"text": text, "drafts": drafts, "batch": batch, "context": arguments.context}
        figures = {"tpot_ms": round(statistics.median(times), 3), "runs_ms": [round(t, 3) for t in times]}
        print(json.dumps(case | figures | {"counts": peer.counted()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.markov_text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--text", default="markov:0.8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM on such weights")
    parser.add_argument("--batch", default="1,8,64", help="with --vllm")
    parser.add_argument("--drafts", default="0,3,7", help="with --vllm: a step; 0: without speculation")
    parser.add_argument("--context", type=int, default=1024, help="with --vllm: tokens of a prompt")
    parser.add_argument("--method", default="ngram_gpu", help="with --vllm: of proposing")
    parser.add_argument("--options", default="{}", help="with --vllm: more arguments of its LLM")
    arguments = parser.parse_args()
    try:
        if arguments.vllm:
            measure_vllm(arguments)
            return
        chance = chance_of(arguments.text)
        write_checkpoint(arguments.folder, arguments.shape, arguments.dtype, chance, device=arguments.device)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
