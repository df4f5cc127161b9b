"""The perdure command."""
