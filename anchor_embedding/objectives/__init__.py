"""What is learned from a batch of pairs."""
