"""The controller of weight sync. It runs the steps of a sync: publish, transfer, fence, install, verify and commit."""
