"""Environments: one interface for all that can be stepped."""
