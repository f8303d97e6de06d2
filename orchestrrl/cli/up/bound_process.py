"""Run a program that receives SIGTERM when its parent process ends: `bound_process.py PARENT_PID PROGRAM ARGUMENT...`.

The program replaces this script, so that its parent does not have to run Python code between fork and exec. The signal
is a feature of Linux (prctl(2), PR_SET_PDEATHSIG); on other systems, the program outlives its parent.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(parent):  # it has ended before the call
    sys.exit(1)
os.execv(command[0], command)
