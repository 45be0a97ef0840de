"""The rules of the algorithm files, and what repairs them: for work on the project itself, in no wheel."""
