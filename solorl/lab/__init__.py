"""Many runs: studies of them, results, and what is shared. It reads run folders and imports no training."""
