"""Metering: what workspaces used, read from the rows that drive their lives (DESIGN D13)."""
