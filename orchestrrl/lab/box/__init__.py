"""A fabric in a box: a site's hosts, ToRs and fibres as network namespaces of this machine, behind emulated switches.

Cross-connects of the switches are the data path: real TCP runs over a pair of veth ends as long as the glass joins
them. Everything lives in namespaces of its own (`enter.py`), and is gone with the process that asked for it.
"""
