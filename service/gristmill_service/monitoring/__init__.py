"""Runs as seen from outside: metrics, health, history and batch views. Nothing here decides for a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """The base of all documents that the API answers with."""

    model_config = ConfigDict(extra="forbid", frozen=True)
