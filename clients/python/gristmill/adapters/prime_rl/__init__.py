"""prime-rl's trainer on gristmill's shards, through a bridge that replaces prime-rl's orchestrator.

Written for prime-rl 0.8, but not tested with its trainer. Needs msgspec and PyTorch, and pyzmq for the zmq transport.

    python -m gristmill.adapters.prime_rl 127.0.0.1:50051 --run my-run --output-dir outputs/my-run --dp-size 8
"""

from typing import TYPE_CHECKING

from gristmill.adapters._core.lazy import importer
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.prime_rl._settings import run_settings

if TYPE_CHECKING:
    from gristmill.adapters.prime_rl._bridge import Bridge
    from gristmill.adapters.prime_rl._micro_batches import Encoding
    from gristmill.adapters.prime_rl._transports import Files, Transport, Zmq

__all__ = ["Bridge", "Encoding", "Files", "Gristmill", "Transport", "Zmq", "run_settings"]

__getattr__ = importer(
    __name__,
    {
        "Bridge": "_bridge",
        "Encoding": "_micro_batches",
        "Files": "_transports",
        "Transport": "_transports",
        "Zmq": "_transports",
    },
    "pip install '.[prime-rl]' in gristmill's checkout",
)
