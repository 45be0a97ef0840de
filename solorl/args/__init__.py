"""A command line from a dataclass, and the arguments that all scripts share."""
