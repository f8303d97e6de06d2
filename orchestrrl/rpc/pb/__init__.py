"""Generated from proto/ by `make generate`; do not edit."""
