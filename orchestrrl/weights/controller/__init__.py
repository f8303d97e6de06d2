"""The controller of weight sync: publish, carry, fence, install, verify, commit."""
