"""Workspaces: their lifecycle, the service that moves them through it, and the reconciler that repairs after a crash."""
