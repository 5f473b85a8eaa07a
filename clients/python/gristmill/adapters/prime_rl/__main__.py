"""`python -m gristmill.adapters.prime_rl`: runs the bridge as a process next to prime-rl's trainer."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from gristmill.adapters.prime_rl import Bridge, Encoding, Files, Gristmill, Zmq
from gristmill.errors import GristmillError


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    output_dir: Path = options.output_dir
    try:
        transport = (
            Zmq(options.host, options.port, options.dp_size, processes_per_rank=options.processes_per_rank)
            if options.transport == "zmq"
            else Files(output_dir, options.dp_size, options.batch_dir)
        )
        bridge = Bridge(
            Gristmill.of_flags(options),
            output_dir,
            dp_size=options.dp_size,
            checkpoint_dir=None if options.no_checkpoints else options.checkpoint_dir or output_dir / "checkpoints",
            resume_step=options.resume_step,
            transport=transport,
            encoding=Encoding(options.temperature, options.env_name, options.pad_to_multiple_of),
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: bridge.stop())
        bridge.run()
    except (GristmillError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gristmill.adapters.prime_rl",
        description="Sends the mini-batches of a gristmill run to prime-rl's trainer, instead of its orchestrator.",
    )
    add = parser.add_argument
    Gristmill.add_flags(parser)
    add("--output-dir", required=True, type=Path, help="prime-rl's run directory, its trainer's output_dir")
    add("--dp-size", required=True, type=int, help="prime-rl's data-parallel ranks")
    add("--transport", choices=("filesystem", "zmq"), default="filesystem", help="prime-rl's rollout_transport.type")
    add(
        "--batch-dir",
        type=Path,
        help="where the trainer reads steps, with filesystem; default: OUTPUT_DIR/batches, for prime-rl after 0.8.0; "
        "for 0.8.0 set OUTPUT_DIR/rollouts",
    )
    add("--host", default="127.0.0.1", help="the address to listen at, with zmq")
    add("--port", type=int, default=5555, help="the first of two ports, with zmq; prime-rl's rollout_transport.port")
    add("--processes-per-rank", type=int, default=1, help="the trainer's world size divided by its dp size, with zmq")
    add("--no-checkpoints", action="store_true", help="prime-rl writes no checkpoints, because it has no [ckpt]")
    add("--checkpoint-dir", type=Path, help="prime-rl's checkpoints; default: OUTPUT_DIR/checkpoints")
    add("--resume-step", type=int, help="prime-rl's resume.step; default: the newest checkpoint")
    add("--temperature", type=float, default=1.0, help="for rows without a column `temperatures`")
    add("--env-name", default="rollouts", help="the environment of groups without a tag")
    add("--pad-to-multiple-of", type=int, default=1, help="pad each micro-batch; prime-rl's model.cp")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
