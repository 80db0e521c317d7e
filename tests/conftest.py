"""Two cores are shared by two pytest workers: one torch thread each, and no deadline for examples."""

import torch
from hypothesis import settings

settings.register_profile("patchlight", deadline=None, derandomize=True)
settings.load_profile("patchlight")

torch.set_num_threads(1)
