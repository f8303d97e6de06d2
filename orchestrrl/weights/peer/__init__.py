"""The process that holds, sends, receives and installs weight versions on one host."""
