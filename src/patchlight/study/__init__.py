"""Images, methods and metrics to cells, and what cells say: tables, rankings and recommendations."""
