"""Who may use this server: tenants, their API keys, and what a key may do."""
