"""A run on disk and on the screen: its folder, checkpoints, metrics and progress."""
