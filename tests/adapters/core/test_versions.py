"""A trainer of a version that its adapter was not tested with is refused, unless its user says to continue."""

from __future__ import annotations

import pytest

from gristmill.adapters._core import versions
from gristmill.adapters._core.versions import check_version
from gristmill.errors import UnsupportedError


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRISTMILL_UNTESTED", raising=False)
    monkeypatch.setattr(versions, "version", lambda distribution: "0.4.1")


@pytest.mark.parametrize("tested", [["0.4"], ["0.3", "0.4.1"]])
def test_a_tested_version_is_accepted(tested: list[str]) -> None:
    check_version("SkyRL", "skyrl", tested)


def test_an_untested_version_is_refused_naming_the_tested_ones() -> None:
    with pytest.raises(UnsupportedError) as refused:
        check_version("SkyRL", "skyrl", ["0.2", "0.3"])
    assert str(refused.value) == (
        "the adapter was tested with SkyRL 0.2 and 0.3, but 0.4.1 is installed; install a tested version, or set "
        "GRISTMILL_UNTESTED=1 to continue with this one"
    )


def test_a_version_is_not_mistaken_for_one_that_begins_with_the_same_digits() -> None:
    with pytest.raises(UnsupportedError, match=r"but 0.4.1 is installed"):
        check_version("SkyRL", "skyrl", ["0.4.10"])


def test_its_user_may_continue(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GRISTMILL_UNTESTED", "1")
    check_version("SkyRL", "skyrl", ["0.3"])
    assert "the adapter was tested with SkyRL 0.3, but 0.4.1 is installed" in caplog.text


def test_a_trainer_that_pip_does_not_know_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check_version("slime", "no-such-distribution", ["0.3"])
