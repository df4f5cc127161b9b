"""Webhooks: a tenant's events, sent to where it wants them, signed, until the receiver has them."""
