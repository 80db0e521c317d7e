"""What all rooms share: results, targets, images, registries, errors, statistics and files."""
