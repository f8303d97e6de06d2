"""Output lengths: statistics of recent steps, forecasts, samples."""
