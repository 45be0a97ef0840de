"""What leaves the machine: policies in formats that other programs read."""
