"""Response lengths: recent steps, forecasts, sampled lengths. Pure."""
