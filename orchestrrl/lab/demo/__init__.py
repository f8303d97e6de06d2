"""The demos: a generation step without and with OrchestrRL, on the same engines, requests and lengths; a redeployment
during a step; and circuit changes in the pauses of a training job."""
