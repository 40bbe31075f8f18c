"""`traffic.py receive` takes one connection and prints its bits per second; `send ADDRESS SECONDS` makes it."""

import socket
import sys
import time

PORT = 5001

if sys.argv[1] == "receive":
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        connection.recv(1 << 20)
        since = now = time.monotonic()
        size = 0
        while chunk := connection.recv(1 << 20):
            size, now = size + len(chunk), time.monotonic()
        print(8 * size / (now - since))
else:
    with socket.create_connection((sys.argv[2], PORT)) as connection:
        end = time.monotonic() + float(sys.argv[3])
        while time.monotonic() < end:
            connection.sendall(bytes(1 << 16))
