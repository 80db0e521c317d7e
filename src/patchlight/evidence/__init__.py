"""Evidence about a model: one tapped pass, or many forward passes over variants of images."""
