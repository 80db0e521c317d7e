"""Two cores are shared by two pytest workers: one torch thread each."""

import torch

torch.set_num_threads(1)
