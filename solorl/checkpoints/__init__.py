"""What a checkpoint holds: its format, the state of environments, replay buffers, and what is refused."""
