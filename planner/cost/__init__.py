"""Step times and costs of engines: hardware, models, roofline, profiles and fits."""
