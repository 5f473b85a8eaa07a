"""Rollouts of other frameworks as rows for `RolloutClient.submit`. No framework is imported.

`from_skyrl`, `from_verl`, `from_slime`, `from_trl` and `from_trl_async`, `from_prime_rl`: each takes the framework's
own objects and returns rows: mappings with the field names of a rollouts file, whose values are NumPy arrays, numbers
and strings. All take these arguments:

    round: the pass over the prompts; with the uid it names the group.
    attempt: one more than before if trajectories are sampled again.
    tags: the environment or task of each row; all rows of a group have the same. Metrics and `tag_shares` are per tag.
    policy_version: the version that sampled the rows, -1 if unknown; None takes the framework's, if it names one.
    columns: keys that the run declares as columns; each keeps its name in the row.
    ignore: keys to leave out although training may need them.

No key is dropped silently: it becomes a field of the row, or is on the list of keys to ignore in the framework's
module, or is refused until `columns` or `ignore` names it. Ambiguous input is refused too (InvalidArgumentError), with
key, row and remedy. Pass whole groups: if the framework does not number a prompt's samples, they are numbered in their
order. Inputs are never modified.

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
