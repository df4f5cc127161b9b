"""Nodes and their leases."""
