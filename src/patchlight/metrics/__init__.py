"""Metrics: is an explanation true? Faithfulness, localisation, robustness, complexity, sanity.

`base.py` says what a metric is, `evaluation.py` measures; the rooms register theirs when first asked for.
"""
