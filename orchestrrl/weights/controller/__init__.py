"""The control part of weight sync: publish, carry, fence, install, verify, commit."""
