"""Speed, side by side: every number is a ratio of medians measured alternately in one run."""
