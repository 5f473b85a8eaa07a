"""Rollouts of other frameworks as rows for `RolloutClient.submit`. No framework is imported.

`from_skyrl`, `from_verl`, `from_slime`, `from_trl` and `from_trl_async`, `from_prime_rl`: each takes the framework's
own objects and returns rows: mappings with the field names of a rollouts file, whose values are NumPy arrays, numbers
and strings. What they take alike:

    round: which time the prompts are sampled; with the uid it names the group.
    attempt: one more than before when trajectories are sampled anew.
    tags: what environment or task each row is of, by which metrics are told and `tag_shares` counts; a group's are the
        same.
    policy_version: the version that sampled them, -1 unknown; where the framework says it itself, None takes its word.
    columns: keys that the run declares as columns; each stands in the row under its own name.
    ignore: keys that are to be left out although training may need them.

Nothing is left out silently: a key is a field of the row, or is known to be none (a table in each framework's module
says which), or is refused until it is named in `columns` or `ignore`. Whatever is ambiguous is refused too
(InvalidArgumentError), naming key, row and remedy. Hand over whole groups at once: where the framework does not number
a prompt's samples, they are numbered as they come. Inputs are never modified.

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
