"""verl's trainer on gristmill's shards: `trainer.v1.trainer_mode=gristmill`, without a line of verl's code changed.

`import verl` finds `plugin` by the entry point group `verl.plugins`. The other modules need verl:

- `run_settings`: the run that verl's configuration describes, or why there is none;
- `tensor_dicts`: a mini-batch's shards as the TensorDict that verl's workers train;
- `trainer`, `workers`: verl's trainer and workers, where they differ.

docs/trainers/verl.md is the guide.
"""
