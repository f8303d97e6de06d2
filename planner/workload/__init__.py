"""Output lengths: the statistics of recent steps, forecasts and samples."""
