"""How much a property is tried: in proportion to the profile of Hypothesis that the run has chosen."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["SOAK", "budget", "register_profiles", "stride"]

SOAK = "soak"

_WHOLE = 100
"""`max_examples` of a profile under which a property gets as many examples as its test says."""
_LEAST = 5


def register_profiles() -> None:
    """Of which pytest's option `--hypothesis-profile` chooses one; ``test`` where it is not given.

    ``quick`` while developing, ``test`` for what must hold before a change is in: both draw the same examples every
    time, so that it depends on the code alone whether they pass. ``soak`` draws others in every run, and twenty times
    as many.
    """
    common = {"deadline": None, "print_blob": True}
    settings.register_profile("quick", max_examples=_WHOLE // 10, derandomize=True, **common)
    settings.register_profile("test", max_examples=_WHOLE, derandomize=True, **common)
    settings.register_profile(SOAK, max_examples=20 * _WHOLE, derandomize=False, **common)
    settings.load_profile("test")


def budget(examples: int) -> int:
    """What a test that wants so many examples gets under the run's profile."""
    return max(_LEAST, examples * settings().max_examples // _WHOLE)


def stride(step: int) -> int:
    """Of a test that tries every so many cases of many, under the run's profile; 1 is all of them."""
    return max(1, step * _WHOLE // settings().max_examples)
