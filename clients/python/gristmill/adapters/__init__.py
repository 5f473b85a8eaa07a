"""Adapters that make a trainer train on gristmill's shards, one module per trainer.

Only the module of a trainer needs the trainer: `from gristmill.adapters.trl import ...` imports TRL, and importing this
package imports no trainer.
"""
