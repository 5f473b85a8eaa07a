"""Monitoring of runs: metrics, health, history and batch views. Nothing here changes a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """The base class of all documents that the API returns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
