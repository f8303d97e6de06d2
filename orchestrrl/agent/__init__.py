"""The agent: a process that scrapes the engines on its host and streams their load to the daemon."""
