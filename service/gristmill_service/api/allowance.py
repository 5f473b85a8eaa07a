"""How much processor time refused calls may cost the service."""

from __future__ import annotations

import math

CALL_S = 0.5e-3
"""The cost of a call that is not read."""
_MOST_CALLERS = 4096


class Allowance:
    """The processor time of the service that refused calls of each name may use: a share of the time, and `free_s` at
    once. Further refusals are delayed.

    most_s: time that a name may owe; more is forgotten. longest_s: the delay of a refusal, unless others are delayed,
        too: delayed refusals of a name leave one after another, so that they cannot come back all at once.
    """

    def __init__(self, share: float, free_s: float, most_s: float, longest_s: float = math.inf) -> None:
        self._share, self._free_s, self._most_s, self._longest_s = share, free_s, most_s, longest_s
        self._accounts: dict[str, tuple[float, float]] = {}

    def charge(self, name: str, cost_s: float, now: float) -> float:
        """Records processor time of a refused call. Returns by how many seconds to delay the refusal. Usually 0."""
        if not cost_s and name not in self._accounts:
            return 0.0
        paid_at, leaves_at = self._accounts.pop(name, (now, now))
        paid_at = min(max(now, paid_at) + cost_s / self._share, now + self._most_s / self._share)
        if delay_s := self._owed_s(paid_at, now):
            spacing_s = min(max(cost_s, CALL_S) / self._share, self._longest_s)
            leaves_at = max(now + min(delay_s, self._longest_s), leaves_at + spacing_s)
            delay_s = leaves_at - now
        self._accounts[name] = paid_at, leaves_at
        if len(self._accounts) > _MOST_CALLERS:
            owing = sorted((paid_at, name) for name, (paid_at, _) in self._accounts.items() if paid_at > now)
            self._accounts = {name: self._accounts[name] for _, name in owing[-_MOST_CALLERS // 2 :]}
        return delay_s

    def wait_s(self, name: str, now: float) -> float:
        """Returns after how many seconds the name has an allowance again."""
        account = self._accounts.get(name)
        return 0.0 if account is None else self._owed_s(account[0], now)

    def _owed_s(self, paid_at: float, now: float) -> float:
        return max(0.0, paid_at - now - self._free_s / self._share)
