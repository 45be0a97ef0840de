"""The algorithm files as data."""
