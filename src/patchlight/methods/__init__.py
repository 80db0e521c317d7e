"""The methods: importing this room fills the registry."""

from patchlight.methods import (
    attention,
    cams,
    compose,
    decomposition,
    decompx,
    gradients,
    random,
    relevance,
    tokentm,
    transition,
)

__all__ = [
    "attention",
    "cams",
    "compose",
    "decomposition",
    "decompx",
    "gradients",
    "random",
    "relevance",
    "tokentm",
    "transition",
]
