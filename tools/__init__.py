"""What makes the files that come with Patchlight. Not part of the package: run in a clone, as `python -m tools.NAME`.

`train_pocket` makes `zoo/pocket.safetensors`, `.json` and `-curve.csv`, and `evaluate_pocket` measures them again;
`checksums` writes the checksums of the files in `zoo/`; `figures` (`make figures`) draws pictures of README and docs.
`coverage` makes the table of which models open; `guard` records the numbers of all methods and metrics on small models
and compares them after a change.
Explainers in `zoo/pocket-diffmask` and `zoo/pocket-shapley` are recipes':
`patchlight diffmask train --recipe diffmask-cifar10` and `patchlight shapley train --recipe shapley-cifar10`.
"""
