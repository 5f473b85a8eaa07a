"""The recorder: a proxy in front of an engine that records an agent's calls as steps of its trajectory.

It is a client of the service, which knows nothing of messages. A call goes to the engine as the agent made it, and also
asks for token ids; what was sampled is in the journal before the answer's last byte goes to the agent, and is submitted
from there. `gristmill record --help` and docs/recorder.md say how it is used.
"""
