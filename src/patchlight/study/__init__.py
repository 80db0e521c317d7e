"""Explains images, measures the maps, and compares methods: cells, tables, rankings and recommendations."""
