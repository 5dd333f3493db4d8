"""On the PYTHONPATH of commands under test: attempts to reach another machine are written down and refused."""

import os
import sys

HERE = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", b"localhost", b"127.0.0.1"}


def refuse(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a string is the path of a local socket
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if host not in HERE:
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(f"{sys.argv[0]}: {event} {host}\n")
        raise OSError(f"no network here: {event} {host}")


sys.addaudithook(refuse)
