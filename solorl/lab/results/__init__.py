"""Result files and what they say."""
