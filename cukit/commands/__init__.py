"""The commands that cukit_cli.py runs, and how their options are read."""
