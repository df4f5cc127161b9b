"""Python kernels in workspaces.

A kernel is a process in a workspace whose variables stay, as any process does: over sleeps, forks and checkpoints. ``inside``
has the programs that run there, ``programs`` sends them, ``talk`` speaks with them. Each cell is a command of the workspace, so
it keeps it awake while it runs, goes on when its caller leaves, and can be attached to again.
"""
