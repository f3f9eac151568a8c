"""Calls that have to be refused, with the words of the message."""

from collections.abc import Callable

import pytest


def refuses(words: str, call: Callable[[], object], error: type[Exception] = ValueError) -> None:
    """Check that the call raises an error whose message has these words, a regular expression."""
    with pytest.raises(error, match=words):
        call()


def refusals(call: Callable[..., object], good: dict[str, object], *cases: tuple[str, object, str]) -> None:
    """Check that each (name of an argument, wrong value, words) is refused where the other arguments are good."""
    call(**good)
    for name, wrong, words in cases:
        refuses(words, lambda name=name, wrong=wrong: call(**{**good, name: wrong}))


def message_of(call: Callable[[], object]) -> str:
    """The error that the call raises, with its type."""
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        call()
    return f"{error.type.__name__}: {error.value}"
