"""The recorder: a proxy in front of an engine that records an agent's calls as steps of its trajectory.

The recorder is a client of the service, which knows nothing of messages. It forwards a call to the engine and also asks
for token ids. The sampled tokens are in the journal before the answer's last byte is sent to the agent, and are
submitted from there. `gristmill record --help` and docs/recorder.md describe its use.
"""
