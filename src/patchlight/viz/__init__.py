"""Pictures: heat over an image, and figures of many methods."""
