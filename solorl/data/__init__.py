"""Recorded transitions on the disk: written in pieces while environments run, read as arrays."""
