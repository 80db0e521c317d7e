"""Networks trained beside a frozen model, and what their training has in common."""
