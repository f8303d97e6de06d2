"""Every token generated so far for every request, in memory and on disk."""
