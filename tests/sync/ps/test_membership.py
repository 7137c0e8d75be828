"""Which regions are waited for."""

from __future__ import annotations

from sync.ps.core.membership import Membership
from sync.ps.core.waiting_settings import WaitingSettings

SETTINGS = WaitingSettings()


def test_a_region_is_waited_for_again_once_it_has_kept_up() -> None:
    membership = Membership(SETTINGS)
    membership.remove(["b"])
    assert membership.absent == ("b",)
    membership.merged("b", came=False, lag_rounds=1, finished=False)
    assert membership.absent == ("b",)
    membership.merged("b", came=True, lag_rounds=0, finished=False)
    assert membership.absent == ()


def test_each_absence_doubles_the_rounds_in_a_row_that_it_must_keep_up_for() -> None:
    membership = Membership(SETTINGS)
    for absence in range(8):
        membership.remove(["b"])
        membership.merged("b", came=True, lag_rounds=0, finished=False)
        if absence:
            membership.merged("b", came=False, lag_rounds=1, finished=False)
        rounds = 0
        while membership.absent:
            membership.merged("b", came=True, lag_rounds=0, finished=False)
            rounds += 1
        assert rounds == (min(2**absence, 32) if absence else 0)


def test_one_that_is_back_may_not_fall_further_behind_than_it_has_been() -> None:
    membership = Membership(SETTINGS)
    membership.remove(["b"])
    membership.merged("b", came=True, lag_rounds=9, finished=False)
    assert membership.lag_rounds("b") == 9
    for behind, least in ((11, 9), (5, 5), (7, 5), (0, 0), (4, 0)):
        membership.merged("b", came=True, lag_rounds=behind, finished=False)
        assert membership.lag_rounds("b") == least
    membership.remove(["b"])
    assert membership.lag_rounds("b") == 0
