"""A crowd whose requests have proposers of their drafts, and masks where they are guided; the books of drafts
and histories are compared each turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.shared_memory.slot_progress import Progress
from tests.engine.crowd import Answer, Crowd, Request
from tests.engine.local_engine import LocalEngine
from tests.engine.speculation.script_table import ScriptTable
from tests.engine.speculation.scripted import VOCAB, Key, ScriptedProposer


@dataclass(frozen=True)
class Job:
    """A request, the proposer of its drafts, and the tokens of output after which it is moved to another
    engine."""

    request: Request
    script: str
    move_after: int | None = None


def mask_of(request: Request, position: int) -> npt.NDArray[np.uint32]:
    """The mask of tokens that a guided request may draw there: about half of them, never none."""
    draw = random.Random(f"{request.prompt} {position}")
    bits = np.array([draw.getrandbits(32) | 1 for _ in range(-(-VOCAB // 32))], dtype=np.uint32)
    bits[-1] &= (1 << VOCAB % 32) - 1
    return bits


def _check_counts(progress: Progress) -> None:
    assert progress.accepted <= progress.drafts
    assert progress.drafts_predicted <= progress.drafts


class DraftCrowd(Crowd):
    """`wanted`: the outputs of `jobs` without drafts; none where these are computed. `progress`: of each
    job's sequence, as its steps published it last."""

    def __init__(
        self,
        engine: LocalEngine,
        jobs: Sequence[Job],
        draw: random.Random,
        *,
        host_blocks: int = 0,
        proposer: ScriptedProposer | ScriptTable | None = None,
        wanted: Sequence[Answer] = (),
    ) -> None:
        super().__init__(engine, reserve=4, host_blocks=host_blocks)
        self._jobs = jobs
        self._draw = draw
        self._proposer = proposer
        self._wanted = wanted
        self._masked: set[tuple[Key, int]] = set()
        self._batches = engine.decode.steps.draft_batches
        # Else steps run while all this is read.
        self._waits = engine.decode.stream is None
        self.progress: dict[int, Progress] = {}

    def run_all(self) -> list[Answer]:
        return self.run([job.request for job in self._jobs], self._draw, join=0.9, each_turn=self._turn)

    def began(self, key: Key, number: int) -> None:
        if self._proposer is not None:
            job = self._jobs[number]
            self._proposer.begin(key, (*job.request.prompt, *self._wanted[number].tokens), job.script)

    def _turn(self) -> None:
        engine, masks = self.engine, []
        for key, number in self.numbers().items():
            request, output = self._jobs[number].request, engine.output[key]
            if not output:
                continue  # its admission was not applied
            self._compare(key, number, request, output)
            position = len(request.text) + len(output)
            if request.masked and (key, position) not in self._masked:
                self._masked.add((key, position))
                masks.append((*key, position, mask_of(request, position)))
        if masks:
            engine.decode.write_masks(masks)
        # Now and then a step has no drafts, or fewer rows than all could use.
        engine.decode.steps.draft_batches = self._batches[: self._draw.randint(0, len(self._batches))]

    def _ended(self) -> list[tuple[int, Answer]]:
        for key, number in self.numbers().items():
            if key in self.engine.finish:
                progress = self.progress[number] = self.engine.decode.progress.progress(*key)
                assert progress.steps + progress.accepted == len(self.engine.output[key]) - 1
                _check_counts(progress)
        return super()._ended()

    def _compare(self, key: Key, number: int, request: Request, output: list[int]) -> None:
        """Compares the counts and the history of a sequence with what its steps gave out."""
        progress = self.progress[number] = self.engine.decode.progress.progress(*key)
        ahead = progress.steps + progress.accepted - (len(output) - 1)
        assert ahead == 0 or (ahead > 0 and not self._waits)
        if self._waits:
            _check_counts(progress)
        history = self.engine.state.history
        if self._waits and history is not None and not request.masked and request.most_drafts != 0:
            ring = history.length - int(history.fixed[key[0]])
            assert history.text(key[0]).tolist() == [*request.text, *output][-ring:]
