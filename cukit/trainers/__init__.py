"""Training methods: the loop that they share (trainer, loop), and one file a method that turns rows into a loss."""
