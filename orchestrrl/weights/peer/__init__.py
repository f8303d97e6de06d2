"""The weight peer: the process that stores, sends, receives and installs weight versions on one host."""
