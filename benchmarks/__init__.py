"""Speed benchmarks: every number is a ratio of medians that were measured alternately in one run."""
