"""A fabric in a box: the hosts, ToRs and fibres of a site as network namespaces and veth pairs on this machine, with
emulated switches.

The switches' cross-connects are the data path: TCP runs over a pair of veth interfaces while a cross-connect joins
them. All interfaces and processes are in separate namespaces (`enter.py`), which are removed when the process that
created them ends.
"""
