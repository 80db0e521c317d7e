"""What a model is asked: one tapped pass, or many forwards over variants of images."""
