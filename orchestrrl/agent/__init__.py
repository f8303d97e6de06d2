"""The agent: a process on the engines' host that scrapes them and streams their load to the daemon."""
