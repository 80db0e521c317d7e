"""Documents and figures: reports in one HTML file, and the papers' figures."""
