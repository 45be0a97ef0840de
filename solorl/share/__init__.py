"""Runs for other people: folders on the Hugging Face hub."""
