"""A Ray cluster for the trainers of the tests, with GPUs that it believes in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.trainers.skyrl.cpu_patches  # noqa: F401

# Ray's processes, SkyRL's workers among them, are this process's children.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_DEDUP_LOGS"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes import PyTorch and SkyRL in each test, whose own warnings are theirs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Of a cluster that outlives the trainers that use it, in this process and others."""
    from ray.cluster_utils import Cluster

    from tests.trainers.skyrl.training import connected

    # SkyRL never gives back the place that it reserves for its workers. Ray would start a process for each CPU, and its
    # workers would give way to all else on the machine.
    options = {"prestart_worker_first_driver": False, "worker_niceness": 0}
    head = {"num_cpus": 1000, "num_gpus": 1000, "include_dashboard": False, "_system_config": options}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    with connected(cluster.address):
        yield cluster.address
    cluster.shutdown()
