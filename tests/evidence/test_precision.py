"""The words for precision: what each comes to where, and a flag of the process that is put back."""

from __future__ import annotations

import threading
from typing import Any, get_args

import pytest
import torch

from patchlight.evidence.precision import Precision, chosen, tf32


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, {"auto": "full", "full": "full", "tf32": "full", "bf16": "bf16"}),
        ("cuda", torch.float32, {"auto": "bf16", "full": "full", "tf32": "tf32", "bf16": "bf16"}),
        ("cuda", torch.float64, {"auto": "full", "full": "full", "tf32": "full", "bf16": "bf16"}),
        ("cuda", torch.bfloat16, {"auto": "full", "full": "full", "tf32": "full", "bf16": "bf16"}),
    ],
)
def test_words_come_to_what_the_device_has(device: str, dtype: torch.dtype, expected: dict[str, str]) -> None:
    found = {word: chosen(word, torch.device(device), dtype) for word in get_args(Precision)}
    assert found == expected


def test_the_last_of_several_threads_puts_the_flag_back() -> None:
    """Begun one after the other and left in the order they began, as a stack would not be."""
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with tf32():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with tf32():
        leave.set()
        thread.join(10)
        assert products.fp32_precision == "tf32", "one thread is still inside"
    assert products.fp32_precision == before
    with pytest.raises(ValueError, match="inside"), tf32():
        raise ValueError("inside")
    assert products.fp32_precision == before
