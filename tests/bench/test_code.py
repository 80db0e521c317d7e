"""What a function's code is recognised by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patchlight.bench.code import described


def test_what_a_decorator_does_is_part_of_a_function() -> None:
    def smoothed(times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any) -> Any:
                return [function(*args) for _ in range(times)]

            return call

        return around

    def method(x: int) -> int:
        return x + 1

    assert described(smoothed(2)(method)) != described(smoothed(3)(method))
    assert described(smoothed(2)(method)) == described(smoothed(2)(method))
