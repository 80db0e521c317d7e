"""Metrics of explanations: faithfulness, localisation, robustness, complexity, sanity.

`base.py` defines what a metric is; each family has a module, which is imported when a metric is first needed.
"""
