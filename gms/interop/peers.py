"""Connections that speak the protocol byte by byte, and that write down what comes."""

import os
import re
import select
import socket
import struct
import time

import msgspec

_NAME = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_WAITED = re.compile(rb"waited_sec=[0-9.]+")


def frame(message):
    """A message as the protocol has it."""
    data = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(data)) + data


class Names:
    """The names of allocations, which each server makes up by itself, by the order they come in."""

    def __init__(self):
        self.real, self.numbers = [], {}

    def hide(self, data):
        def number(found):
            name = found.group()
            if name not in self.numbers:
                self.numbers[name] = len(self.real)
                self.real.append(name)
            return b"#%035d" % self.numbers[name]

        return _NAME.sub(number, data)

    def show(self, text):
        """The name for a number, or what is given if it is no number."""
        if isinstance(text, int):
            return self.real[text].decode() if text < len(self.real) else "no-such-allocation"
        return text


class Peer:
    """One connection."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.buffer, self.files, self.ended = bytearray(), 0, False
        self.had_files = False

    def send(self, data):
        try:
            self.socket.sendall(data)
        except OSError:
            self.ended = True

    def close(self):
        self.socket.close()

    def read(self, seconds):
        """What has come within the time: frames, each with its number of descriptors, and the end."""
        got = []
        while not self.ended and select.select([self.socket], [], [], seconds)[0]:
            try:
                data, files, _, _ = socket.recv_fds(self.socket, 65536, 16)
            except ConnectionResetError:
                data, files = b"", []
            for file in files:
                os.close(file)
            self.files += len(files)
            self.had_files |= bool(files)
            self.buffer += data
            if not data:
                self.ended = True
                got.append(("end", 0))
            got += self._frames()
        return got

    def _frames(self):
        while len(self.buffer) >= 4:
            length = 4 + struct.unpack("!I", self.buffer[:4])[0]
            if len(self.buffer) < length:
                return
            data = bytes(self.buffer[:length])
            del self.buffer[:length]
            files, self.files = self.files, 0
            yield data, files

    def answer(self, seconds=10):
        """The next frame, or the end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            got = self.read(0.001)
            if got:
                return got
        raise TimeoutError("no answer")


class Side:
    """One server with its connections, by number.

    ``keeps_open``: it may keep a connection open that it has sent a descriptor on, though its session has
    ended. The Python server sends one by a duplicate of the connection, which it does not close.
    """

    def __init__(self, path, keeps_open=False):
        self.keeps_open = keeps_open
        self.path, self.names, self.peers, self.waiting = path, Names(), {}, set()

    def _note(self, got):
        return [
            (_WAITED.sub(b"waited_sec=?", self.names.hide(data)) if data != "end" else data, files)
            for data, files in got
        ]

    def open(self, number):
        self.peers[number] = Peer(self.path)

    def say(self, number, message):
        message = {
            key: self.names.show(value) if key == "allocation_id" else value for key, value in message.items()
        }
        return self.say_bytes(number, frame(message))

    def say_bytes(self, number, data, quiet=False):
        """Sends and answers what comes back; with ``quiet`` there may be nothing for now."""
        peer = self.peers[number]
        peer.send(data)
        got = peer.read(0.05) if quiet else peer.answer()
        # A commit ends the session, with its answer or right after it.
        if any(b"commit_response" in data for data, _ in got if data != "end"):
            kept = self.keeps_open and peer.had_files
            deadline = time.monotonic() + (0.5 if kept else 10)
            while not peer.ended and time.monotonic() < deadline:
                got += peer.read(0.1)
            if kept and not peer.ended:
                peer.ended = True
                got.append(("end", 0))
        return self._note(got)

    def drop(self, number):
        self.peers.pop(number).close()

    def settle(self, seconds):
        """What has come on any connection by itself."""
        notes = {}
        for number, peer in sorted(self.peers.items()):
            got = self._note(peer.read(seconds))
            if got:
                notes[number] = got
        return notes

    def probe(self, kind):
        """The answer to a request that needs no session."""
        peer = Peer(self.path)
        peer.send(frame({"type": kind}))
        got = peer.answer()
        peer.close()
        return self._note(got[:1])

    def close(self):
        for number in list(self.peers):
            self.drop(number)
