"""Where the two sides meet: public API models, control plane to node, node to guest."""
