"""Where bytes cross the node's border: egress policy and the guest's own API."""
