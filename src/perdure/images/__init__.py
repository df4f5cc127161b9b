"""Images: recipes, the build, golden snapshots."""
