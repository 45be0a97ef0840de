"""The arguments of a script and of `solo`'s verbs."""
