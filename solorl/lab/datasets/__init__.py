"""Making data sets, of policies that play and of replay buffers, and exchanging them with Minari."""
