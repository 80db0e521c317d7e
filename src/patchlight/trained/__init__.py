"""Explainers: networks trained beside a frozen model, and what their training has in common.

An explainer gives the loop a `Learner` (`loop.py`): one step, its report, its state. Settings are a `Training`, what is
saved is an `Explainer`.
"""
