"""The bridge gives prime-rl's trainer each mini-batch once, whatever ends and begins again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill import FailedPreconditionError, InvalidArgumentError, RolloutClient
from gristmill._wire.addresses import Position
from gristmill.adapters.prime_rl import Files
from gristmill.adapters.prime_rl._run_directory import LEDGER, rank_file
from tests.adapters.prime_rl.conftest import CONFIG, Running, eventually, group, trained
from tests.adapters.prime_rl.trainer import Trainer
from tests.on_loop import Service

Start = Callable[..., Running]


def roll_out(rollouts: RolloutClient, count: int, **changes: Any) -> None:
    """Creates the run and submits that many groups, each of which is a step."""
    rollouts.create_run(CONFIG | {"max_buffered_batches": 8} | changes)
    for number in range(1, count + 1):
        rollouts.submit(group(number))
    rollouts.finish()


def places(rollouts: RolloutClient) -> set[Position]:
    return set(rollouts.status().models["policy"].next)


def committed(rollouts: RolloutClient) -> Position:
    return rollouts.status().models["policy"].committed


def test_a_run_is_trained_a_mini_batch_a_step(rollouts: RolloutClient, bridge: Start, trainer: Trainer) -> None:
    roll_out(rollouts, 4)
    running = bridge()
    trainer.broadcast()
    for _ in range(4):
        trainer.train()
    trainer.save()
    running.finished()
    assert trained(trainer) == [1, 2, 3, 4]
    assert rollouts.status().batches_freed == 2


def test_a_step_is_acknowledged_and_its_version_announced_when_its_weights_are_there(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 2)
    bridge()
    trainer.broadcast()
    eventually(trainer.is_given_a_step)
    assert (places(rollouts), rollouts.policy_version()) == ({Position(0)}, 0)
    trainer.train()
    eventually(lambda: places(rollouts) == {Position(0, 0, 1)})
    assert rollouts.policy_version() == 1
    assert committed(rollouts) == Position(0)


def test_a_step_is_committed_when_a_checkpoint_has_it_also_while_rollouts_are_waited_for(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    rollouts.create_run(CONFIG)
    for number in (1, 2):
        rollouts.submit(group(number))
    bridge()
    trainer.train()
    trainer.train()
    eventually(lambda: places(rollouts) == {Position(1)})
    assert committed(rollouts) == Position(0)
    trainer.save()
    eventually(lambda: committed(rollouts) == Position(1))
    assert rollouts.status().batches_freed == 1


def test_a_bridge_that_begins_again_goes_on_where_the_trainer_is(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 6)
    first = bridge()
    trainer.broadcast()
    trainer.train()
    trainer.train()
    trainer.save()
    eventually(lambda: committed(rollouts) == Position(1))
    trainer.train()
    eventually(trainer.is_given_a_step)
    first.stop()
    # Trained while nobody looks.
    trainer.train()
    again = bridge()
    trainer.train()
    trainer.train()
    trainer.save()
    again.finished()
    assert trained(trainer) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("is_cleaned", [False, True])
def test_a_trainer_that_goes_back_to_its_checkpoint_is_given_the_same_steps_again(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer, is_cleaned: bool
) -> None:
    roll_out(rollouts, 4)
    running = bridge()
    trainer.broadcast()
    trainer.train()
    trainer.save()
    trainer.train()
    trainer.train()
    eventually(lambda: places(rollouts) == {Position(1, 0, 1)})
    again = Trainer(trainer.output_dir, 2)
    again.resume()
    if is_cleaned:
        # As prime-rl's launcher does before it resumes.
        for step in (2, 3, 4):
            for kind in ("batches", "broadcasts"):
                shutil.rmtree(trainer.output_dir / f"{kind}/step_{step}", ignore_errors=True)
    again.broadcast()
    for _ in range(3):
        again.train()
    again.save()
    running.finished()
    assert trained(again) == [1, 2, 3, 4]


def test_a_file_that_was_removed_before_the_trainer_read_it_is_written_again(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 2)
    bridge()
    eventually(trainer.is_given_a_step)
    written = trainer.output_dir / "batches"

    def is_removed() -> bool:
        """The bridge may write in there at the same moment."""
        shutil.rmtree(written, ignore_errors=True)
        return not written.exists()

    eventually(is_removed)
    trainer.train()
    assert trained(trainer) == [1]


def test_without_checkpoints_a_step_is_committed_with_its_acknowledgement(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 4)
    first = bridge(checkpoint_dir=None)
    trainer.broadcast()
    trainer.train()
    eventually(lambda: committed(rollouts) == Position(0, 0, 1))
    first.stop()
    again = bridge(checkpoint_dir=None)
    for _ in range(3):
        trainer.train()
    again.finished()
    assert trained(trainer) == [1, 2, 3, 4]


def test_without_checkpoints_a_trainer_that_begins_from_nothing_is_given_what_is_left(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 4)
    running = bridge(checkpoint_dir=None)
    trainer.broadcast()
    trainer.train()
    eventually(lambda: committed(rollouts) == Position(0, 0, 1))
    # As prime-rl's launcher does before it begins from nothing.
    for kind in ("batches", "broadcasts"):
        shutil.rmtree(trainer.output_dir / kind)
    eventually(rank_file(trainer.output_dir / "batches", 1, 0).exists)
    again = Trainer(trainer.output_dir, 2)
    for _ in range(3):
        again.train()
    running.finished()
    assert trained(again) == [2, 3, 4]


def test_a_run_may_begin_behind_a_checkpoint_of_another(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 2)
    trainer.step = 7
    trainer.save()
    running = bridge()
    trainer.train()
    trainer.train()
    trainer.save()
    running.finished()
    assert (trainer.step, trained(trainer)) == (9, [1, 2])


def test_a_checkpoint_before_what_is_committed_is_refused_naming_the_remedy(
    rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 4)
    first = bridge()
    trainer.train()
    trainer.train()
    trainer.save()
    eventually(lambda: committed(rollouts) == Position(1))
    first.stop()
    refused = bridge(resume_step=1)
    with pytest.raises(FailedPreconditionError, match="is committed up to step 2, but prime-rl resumes from step 1"):
        refused.finished()
    (trainer.output_dir / LEDGER).unlink()
    # A trainer that resumes from step 1, whose later checkpoint is still there.
    again = Trainer(trainer.output_dir, 2)
    again.step = 1
    running = bridge(resume_step=1)
    eventually((trainer.output_dir / LEDGER).exists)
    again.broadcast()
    again.train()
    again.train()
    again.save()
    running.finished()
    assert trained(again) == [3, 4]


def test_a_directory_of_another_run_is_refused_naming_the_remedy(
    service: Service, rollouts: RolloutClient, bridge: Start, trainer: Trainer
) -> None:
    roll_out(rollouts, 2)
    first = bridge()
    trainer.train()
    eventually(lambda: places(rollouts) == {Position(0, 0, 1)})
    first.stop()
    service.runs.delete(rollouts.run)
    roll_out(rollouts, 2)
    with pytest.raises(FailedPreconditionError, match=r"gristmill.json is of run .* remove the file to continue"):
        bridge().finished()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "left_padded"}, "layout is left_padded, but .* create the run with layout: packed"),
        (
            {"loss_reduction": "token_mean"},
            "loss_reduction is token_mean, but .* create the run with loss_reduction: none",
        ),
    ],
)
def test_a_run_that_prime_rl_cannot_train_is_refused(
    rollouts: RolloutClient, bridge: Start, changes: dict[str, Any], reason: str
) -> None:
    rollouts.create_run(CONFIG | changes)
    with pytest.raises(InvalidArgumentError, match=reason):
        bridge().finished()


def test_a_step_whose_directory_is_removed_while_it_is_written_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, replace = Files(tmp_path, 1), Path.replace

    def removed(path: Path, target: Path) -> Path:
        shutil.rmtree(path.parent)
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", removed)
        files.send(1, [b"step"])
    assert files.lacks(1)
    files.send(1, [b"step"])
    assert not files.lacks(1)


def test_a_file_appears_whole(rollouts: RolloutClient, bridge: Start, trainer: Trainer) -> None:
    roll_out(rollouts, 2)
    bridge()
    eventually(trainer.is_given_a_step)
    assert sorted(path.name for path in Path(trainer.output_dir / "batches/step_1").iterdir()) == [
        "rank_0.bin",
        "rank_1.bin",
    ]
