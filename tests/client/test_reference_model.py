"""A service makes of random rows what an independent reference makes of them."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.offline.test_reference_model import SEED
from tests.on_loop import Service
from tests.reference_model.fuzz import campaign
from tests.reference_model.served import ByService


@pytest.mark.slow
def test_a_service_makes_what_the_specification_says(service: Service) -> None:
    """Also of rewards that come late, of columns that trainers write, and of groups that others replace.

    `python -m tests.tools.fuzz.batches --through service` compares thousands.
    """
    with closing(ByService(service.grpc_address, service.http_url)) as check:
        assert sum(campaign(check, SEED, batches=100)) >= 100
