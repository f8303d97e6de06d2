"""Step times and prices: hardware, models, roofline, profiles, fits. Pure."""
