"""slime's RolloutManager with the run's batches instead of slime's own batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.adapters.slime._feed import Feed


class FromGristmill:
    """A mixin that replaces methods of slime's `RolloutManager` (slime/ray/rollout.py); see `swap`."""

    args: Any
    data_source: Any
    rollout_id: int
    train_parallel_config: Mapping[str, int]
    _feed: Feed | None = None

    def generate(self, rollout_id: int) -> Any:
        """Return boxes with the train data of each rank, for slime's train actors."""
        if self._feed is None:
            self._feed = Feed(self.args, self.train_parallel_config, rollout_id)
        self._feed.begin(rollout_id)
        if self._feed.is_sampled_by_slime:
            if not self._feed.has_batch:
                return super().generate(rollout_id)  # type: ignore[misc]
            # Skip the batch's prompts, because they are not sampled again.
            self.data_source.get_samples(self.args.rollout_batch_size)
        self.rollout_id = rollout_id
        return self._split_train_data_by_dp(None)

    def _convert_samples_to_train_data(self, samples: Any) -> None:
        """Submit the samples that slime's rollout function returned."""
        assert self._feed is not None, "generate creates it"
        self._feed.submit(samples, self.rollout_id)

    def _split_train_data_by_dp(self, data: None) -> list[Any]:
        """Return the next batch. data: the result of the method above."""
        assert self._feed is not None, "generate creates it"
        return [self._boxed(rank) for rank in self._feed.next(self.rollout_id)]

    def _boxed(self, rank: dict[str, Any]) -> Any:
        """Put a rank's data into the transport from which the rank fetches it, like slime."""
        import ray
        from slime.utils.misc import Box

        transport = getattr(self.args, "rollout_data_transport", "object-store")
        return Box(ray.put(rank, _tensor_transport="nixl") if transport == "nixl" else ray.put(rank))

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)  # type: ignore[misc]
        if self._feed is not None:
            self._feed.saved(rollout_id)

    def dispose(self) -> None:
        if self._feed is not None:
            self._feed.finish()
            self._feed.close()
        super().dispose()  # type: ignore[misc]


def swap() -> None:
    """Replace slime's RolloutManager with a subclass that returns the run's batches.

    Call it before `create_rollout_manager`, which looks up the class in its module. slime has arguments that replace
    functions, but no argument that replaces this class.
    """
    import ray
    import slime.ray.rollout as module

    plain = module.RolloutManager.__ray_metadata__.modified_class.__ray_actor_class__
    module.RolloutManager = ray.remote(type("RolloutManager", (FromGristmill, plain), {}))
