"""Engine profiles: their files, measurement, import and fits."""
