"""Begin the training of some ranks that do not resume from a checkpoint. Reads the state, returns events.

Like a trainer that resumes, a trainer that begins supersedes earlier trainers of its ranks. The new trainer does not
name a checkpoint, so it may begin only if the trainer before it committed everything that it acknowledged: otherwise,
the training since the last commit may be lost, and its batches would be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill_service.config import Model
from gristmill_service.run.machine.answers import Resumed
from gristmill_service.run.machine.decisions.progress import (
    check_rank,
    model_state,
    next_incarnation,
    next_of,
    standing,
    text_of,
)
from gristmill_service.run.machine.events import RanksBegan
from gristmill_service.run.machine.state import Decision, State


def begin(state: State, model: Model, ranks: Sequence[int], run_id: str) -> Decision[Resumed]:
    """Assigns the ranks a new incarnation. The answer has the position of the rank that is furthest behind."""
    if len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(f"ranks {list(ranks)} contains a rank twice; send each rank once")
    current = model_state(state, model)
    for rank in ranks:
        check_rank(state, model, rank)
    reached = min(standing(state, model, current.next[rank]) for rank in ranks)
    if reached > standing(state, model, current.committed):
        raise FailedPreconditionError(
            f"{model} rank {', '.join(map(str, ranks))}: an earlier trainer acknowledged what lies before "
            f"{text_of(reached)}, and committed what lies before {text_of(current.committed)}; call "
            "load_state_dict(state) with the state of a checkpoint to resume there, or load_state_dict({}) to train "
            "again from the last commit"
        )
    began = RanksBegan(model, tuple(ranks), next_incarnation(state, model, run_id))

    def answer(after: State) -> Resumed:
        behind = min(next_of(after, model, rank) for rank in ranks)
        return Resumed(began.incarnation, behind, run_id, after.generation)

    return [began], answer
