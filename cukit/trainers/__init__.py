"""Training methods: the loop they share (trainer), and one file a method that turns rows into a loss."""
