"""Metrics: is an explanation true? Faithfulness, localisation, robustness, complexity, sanity.

`base.py` says what a metric is; each family has a file, which is imported when a metric is first asked for.
"""
