"""Every figure that the OrchestrRL paper reports, made again from first principles, beside what comes out here."""
