"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """what: the thing. found: how it is. remedy: what to do about it; empty where it is well."""

    what: str
    found: str
    remedy: str = ""

    @property
    def is_well(self) -> bool:
        return not self.remedy

    def __str__(self) -> str:
        if self.is_well:
            return f"ok     {self.what}: {self.found}"
        return f"WRONG  {self.what}: {self.found}; {self.remedy}"
