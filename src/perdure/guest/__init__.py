"""What runs inside a workspace. Standard library only; shares nothing with the server but wire.guest."""
