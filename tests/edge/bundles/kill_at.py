"""A process that kills itself at one of its file operations, as Python's text for `python -c`."""

from __future__ import annotations

from typing import Final

# needs `folder`, the text that the paths of counted operations hold, and `TOUCHES`, their events
KILL_AT: Final = """
import os, signal, sys

def kill_at(number):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in TOUCHES and (event == "fcntl.flock" or folder in str(arguments[:2])):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""
