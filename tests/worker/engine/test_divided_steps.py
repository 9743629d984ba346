"""A worker of several devices whose prompts and decode steps are by the GPU kernels, a part on each."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from baton.base.errors import BatonError, FailureCause
from baton.engine.executor.decode_factory import decode_loop
from baton.engine.kernels.product_rows import product_rows
from baton.engine.prefill.factory import prompt_pass
from baton.engine.prefill.group_pass import GroupPass
from baton.engine.shared_memory.step_shape import StepShape
from services.common.config.worker import WorkerConfig
from services.worker.engine import assembly
from services.worker.engine.startup import prefill_setup
from services.worker.engine.startup.model_loader import LoadedModel
from tests.engine.local_engine import CONFIG
from tests.engine.parallel.turns import TurnGroup
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve
from tests.worker.engine.test_prefix_cache import ask, report
from tests.worker.engine.test_quantised_cache import words

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[TurnGroup]:
    """Lets workers of a CPU's ranks compute by the kernels of GPUs; the groups that they make."""
    made: list[TurnGroup] = []

    def group(config: WorkerConfig, model: LoadedModel, shape: StepShape, *, mixes: bool) -> TurnGroup:
        rows = product_rows(model.chunk_tokens + shape.rows)
        made.append(TurnGroup(model.ranks, shape.rows, rows))
        return made[-1]

    def loop(*arguments: Any, **options: Any) -> Any:
        return decode_loop(*arguments, **options, interpreted=True)

    def prompts(*arguments: Any, **options: Any) -> Any:
        return prompt_pass(*arguments, **options | {"interpreted": True, "graphs": False})

    # Each takes the interpreter seconds: tests/engine/parallel/test_prefill_on_ranks.py has them.
    for name in ("warm", "measure_products", "measure_step_times"):
        monkeypatch.setattr(GroupPass, name, lambda self: None)
    monkeypatch.setattr(assembly, "device_group", group)
    monkeypatch.setattr(assembly, "decode_loop", loop)
    monkeypatch.setattr(prefill_setup, "prompt_pass", prompts)
    return made


def test_prompts_decode_steps_and_both_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is of role both, with prefix hits; a prompt that comes to a device too late ends the worker,
    and has no token."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | MODEL))
    settings: dict[str, Any] = {"checkpoint": tmp_path, "weights": "random"}
    with contextlib.closing(SteppedEngine(tmp_path, "both", prefix_cache=False, **settings)) as alone:
        wanted = [ask(alone, words(count))[0] for count in (3, 11)]
    made = by_kernels(monkeypatch)
    settings |= {"tensor_parallel": 2, "numerics": "fast"}
    with contextlib.closing(SteppedEngine(tmp_path, "both", "a secret", **settings)) as engine:
        for again in range(2):
            assert [ask(engine, words(count))[0] for count in (3, 11)] == wanted
            assert (report(engine).hit_tokens > 0) == bool(again)
        engine.assert_free()
        first = made[0].turns[0]
        end = first.end

        def end_in_vain(part: Tensor, column: int) -> None:
            end(part, column)
            made[0].whole.zero_()

        ticket = engine.ask(reserve=reserve(name=b"zz", tokens=5)).reserved.ticket
        monkeypatch.setattr(first, "end", end_in_vain)
        number = engine.send(prefill=prefill(ticket, name=b"zz", tokens=5))
        engine.records.clear()
        with pytest.raises(BatonError) as caught:
            engine.turn(20)
        engine.read()
        assert caught.value.cause is FailureCause.EXCHANGE
        assert engine.records == []
        assert not any(e.prefill.HasField("first_token") for e in engine.events if e.id == number)


@pytest.mark.multigpu
@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("mixed", [True, False])
def test_two_gpus_of_one_worker(tmp_path: Path, numerics: str, mixed: bool) -> None:
    """The tokens in float32 are those of one GPU."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | MODEL))
    settings: dict[str, Any] = {
        "checkpoint": tmp_path, "weights": "random", "device": "cuda", "dtype": "float32",
        "numerics": numerics, "mixed_steps": mixed, "tune": "off",
    }  # fmt: skip
    found = []
    for count in (1, 2):
        with contextlib.closing(
            SteppedEngine(tmp_path, "both", "a secret", tensor_parallel=count, **settings)
        ) as engine:
            asked = [*map(words, (3, 21, 40)), words(21)]
            found.append([ask(engine, prompt, most=10)[0] for prompt in asked])
            assert report(engine).hit_tokens > 0
            engine.assert_free()
    assert found[0] == found[1]
