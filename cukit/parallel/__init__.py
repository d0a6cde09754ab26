"""Several processes as one run: groups of ranks and their collectives. docs/ARCHITECTURE.md says who uses them."""
