"""A fabric in a box: a site's hosts, ToRs and fibres as network namespaces of this machine, with emulated switches.

The switches' cross-connects are the data path: TCP runs over a pair of veth interfaces while a cross-connect joins
them. All of it is in separate namespaces (`enter.py`), which end with the process that created them.
"""
