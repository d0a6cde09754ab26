"""Rows of data: where they come from, their ids and masks, and the order they are drawn in."""
