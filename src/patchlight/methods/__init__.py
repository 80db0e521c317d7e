"""The methods: importing this room fills the registry."""

from patchlight.methods import attention, cams, compose, gradients, random

__all__ = ["attention", "cams", "compose", "gradients", "random"]
