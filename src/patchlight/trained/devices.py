"""Training on several devices with Accelerate: the processes share the batches and take the same steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.extras import missing_extra


class Devices:
    """The processes of `accelerate launch`; a single process uses the loader and the network unchanged."""

    def __init__(self, vit: Anatomy) -> None:
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise missing_extra("training needs", "accelerate", "train") from error
        self._accelerator = Accelerator(cpu=vit.device.type == "cpu", device_placement=False)
        self._alone = self._accelerator.num_processes == 1
        self.rank = int(self._accelerator.process_index)
        self.main = bool(self._accelerator.is_main_process)
        if not self._alone:
            vit.model.to(self._accelerator.device)

    def share(self, loader: Iterable[Any]) -> Iterable[Any]:
        """A loader of the batches of this process."""
        return loader if self._alone else self._accelerator.prepare(loader)

    def joined(self, network: nn.Module) -> nn.Module:
        """The network that every step calls, whose gradients are averaged over all processes."""
        return network if self._alone else self._accelerator.prepare_model(network)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean of numbers over all processes."""
        return numbers if self._alone else self._accelerator.reduce(numbers, "mean")
