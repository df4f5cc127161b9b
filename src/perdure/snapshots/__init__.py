"""Snapshots: page log, capture, disk layers, the store that holds them."""
