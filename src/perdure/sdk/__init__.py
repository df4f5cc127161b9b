"""The Python SDK: written async, its sync twin generated."""
