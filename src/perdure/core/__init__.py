"""What every layer may use: typed ids, the error tree, clocks, configuration, durable writes."""
