"""Processes that work in turns: each is told over a pipe what to do, and does nothing between.

What a turn is timed by is the same machine a moment later for the next process, whose start and first steps
are paid once.
"""

import multiprocessing
import multiprocessing.connection
import subprocess
import tempfile
import traceback


class Failed(Exception):
    """A process ended, was silent for too long, or could not do what it was asked for."""


class Process:
    """A program that was started with ``--turns`` and a descriptor, for :func:`serve`."""

    def __init__(self, label, command):
        self.label = label
        self._pipe, theirs = multiprocessing.Pipe()
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, "--turns", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        # So that the pipe ends with the process.
        theirs.close()

    def answer(self, seconds):
        """What it says next. :class:`Failed` where that is nothing."""
        try:
            if not self._pipe.poll(seconds):
                raise Failed(f"{self.label}: nothing in {seconds:.0f} s\n{self.log()}")
            said = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if "failed" in said:
            raise Failed(f"{self.label}: {said['failed']}")
        return said["done"]

    def ask(self, what, *arguments, seconds=600):
        """Has it do something; what came of it."""
        try:
            self._pipe.send((what, arguments))
        except OSError:
            raise self._ended() from None
        return self.answer(seconds)

    def _ended(self):
        # What it says last comes after the end of its pipe.
        self._wait(10)
        return Failed(f"{self.label}: it ended\n{self.log()}")

    def _wait(self, seconds):
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log(self):
        """The end of what it has written."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:])

    def end(self):
        """Ends it, by force if need be."""
        self._pipe.close()
        self._wait(30)
        self._log.close()


def serve(descriptor, functions, ready=None):
    """Says that this process is ready, and calls functions by name as it is told to, until nobody is left."""
    pipe = multiprocessing.connection.Connection(descriptor)
    pipe.send({"done": ready})
    while True:
        try:
            what, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            said = {"done": functions[what](*arguments)}
        except Exception:
            said = {"failed": traceback.format_exc()}
        pipe.send(said)
