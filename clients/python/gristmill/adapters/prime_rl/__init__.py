"""prime-rl's trainer on gristmill's shards, by a bridge that stands in the place of prime-rl's orchestrator. Needs
msgspec and PyTorch, for the zmq transport pyzmq (`pip install 'gristmill[prime-rl]'`), and nothing of prime-rl itself.

    python -m gristmill.adapters.prime_rl 127.0.0.1:50051 --run my-run --output-dir outputs/my-run --dp-size 8
"""

try:
    from gristmill.adapters.prime_rl.bridge import Bridge
    from gristmill.adapters.prime_rl.micro_batches import Encoding
    from gristmill.adapters.prime_rl.transports import Files, Transport, Zmq
except ImportError as missing:
    raise ImportError(f"this adapter needs more ({missing}): pip install 'gristmill[prime-rl]'") from missing

__all__ = ["Bridge", "Encoding", "Files", "Transport", "Zmq"]
