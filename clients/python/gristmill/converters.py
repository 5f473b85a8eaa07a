"""Converts rollouts of other frameworks to rows for `RolloutClient.submit`, without importing the framework.

`from_skyrl`, `from_verl`, `from_slime`, `from_trl`, `from_trl_async` and `from_prime_rl` accept the framework's objects
and return rows: mappings with the field names of a rollouts file. The values are NumPy arrays, numbers and strings. All
functions have these arguments:

    round: the pass over the prompts. uid and round together identify the group.
    attempt: the number of this attempt; increase it by one if trajectories are sampled again.
    tags: the environment or task of each row, equal for all rows of a group. Metrics and `tag_shares` are per tag.
    policy_version: the version that sampled the rows, -1 if unknown; None: the framework's version, if it reports one.
    columns: keys that the run declares as columns. They are copied to the row under the same name.
    ignore: keys to leave out although training may need them.

No key is dropped silently. A key becomes a field of the row, or the framework's module lists it as ignored, or it is
refused until `columns` or `ignore` contains it. Ambiguous input is refused too: the InvalidArgumentError names the key,
the row and the remedy. Pass whole groups: if the framework does not number the samples of a prompt, they are numbered
in their order. Inputs are never modified.

    client.submit(from_verl(rollouts))
"""

from __future__ import annotations

from gristmill._converters.prime_rl import from_prime_rl
from gristmill._converters.skyrl import from_skyrl
from gristmill._converters.slime import from_slime
from gristmill._converters.trl import from_trl
from gristmill._converters.trl_async import from_trl_async
from gristmill._converters.verl import from_verl

__all__ = ["from_prime_rl", "from_skyrl", "from_slime", "from_trl", "from_trl_async", "from_verl"]
