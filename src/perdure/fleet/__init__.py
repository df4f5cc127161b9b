"""The fleet: which machines run workspaces, and whether they still may."""
