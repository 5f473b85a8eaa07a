"""The recorder: a proxy in front of an engine that records an agent's calls as steps of its trajectory.

The recorder is a client of the service, which does not handle messages. It forwards each call to the engine and also
requests token ids. It writes the sampled tokens to its journal before it sends the last byte of the answer to the
agent, and submits them from there. `gristmill record --help` and docs/recorder.md describe its use.
"""
