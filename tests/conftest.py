"""Two cores are shared by two pytest workers: one torch thread each, and no deadline for examples."""

import os

import torch
from hypothesis import settings

from tests import close

settings.register_profile("patchlight", deadline=None, derandomize=True)
settings.load_profile("patchlight")

torch.set_num_threads(int(os.environ.get("PATCHLIGHT_TEST_THREADS", "1")))
if "PATCHLIGHT_MARGINS" in os.environ:
    close.watch()
