"""The node: one supervised machine per awake workspace."""
