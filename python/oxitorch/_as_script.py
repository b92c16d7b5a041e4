"""What `oxitorch preflight` runs as the script when it was called from Python: asks that process to run the function.

Prints nothing; the exit status is that of the run.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def address(folder: str) -> Iterator[str]:
    """The address of the socket in a folder. The kernel takes 107 bytes, and the name of a folder may be longer."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def main(folder: str) -> int:
    with socket.socket(socket.AF_UNIX) as s:
        with address(folder) as place:
            s.connect(place)
        s.sendall(os.environ["OXITORCH_PREFLIGHT"].encode() + b"\n")
        status = s.makefile().readline()
    return int(status) if status else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
