"""Perdure: persistent machines for AI agents that stop the compute without losing the agent."""

__version__ = "0.1.0"
