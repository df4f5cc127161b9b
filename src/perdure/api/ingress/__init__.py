"""Ports of workspaces over HTTP: who may in, by which address, and what passes in either direction.

``names`` addresses and ``headers`` what passes are pure; ``front`` decides, ``relay`` and ``sockets`` carry.
"""
