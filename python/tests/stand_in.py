"""A workload of the demos without PyTorch and a GPU, for test_demos.py: its steps sleep."""

import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "demos"))

from workload import arguments, run


class Event:
    """A GPU's that is at work for as long as the host is."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self._at = time.perf_counter()

    def elapsed_time(self, other):
        return (other._at - self._at) * 1e3


class Cuda:
    """`torch.cuda`, as far as it goes."""

    Event = Event

    class OutOfMemoryError(Exception):
        """As PyTorch's."""

    @staticmethod
    def synchronize():
        pass

    @staticmethod
    def max_memory_allocated():
        return 1000

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info():
        return 1, 10

    @staticmethod
    def get_device_name():
        return "none"

    @staticmethod
    def memory_stats():
        return {}


class Loss(float):
    """A tensor of one number."""

    def detach(self):
        return self


class Losses(list):
    """A tensor of some."""

    def double(self):
        return self

    def tolist(self):
        return [float(loss) for loss in self]


class Torch:
    """`torch`, as far as it goes."""

    __version__ = "none"
    cuda = Cuda
    stack = Losses


class Sampler:
    """A generator of PyTorch's, as far as it goes."""

    @staticmethod
    def manual_seed(seed):
        pass


if __name__ == "__main__":
    args = arguments(
        __doc__,
        steps=6,
        warmup=2,
        # Milliseconds of a step, of vpmm's and of the others'.
        ours=(float, 2.0),
        others=(float, 4.0),
        # A step in which an allocator, the one that is named, does something.
        at=(int, -1),
        who=(str, "vpmm"),
        what=(str, ""),
        # A file for the begin and the end of each step.
        log=(str, ""),
        # Numbers that are drawn, one at each step, are less than this.
        draw=(int, 1),
    )
    shapes = random.Random(args.seed)

    def step(number):
        begin = time.monotonic()
        drawn = shapes.randrange(args.draw)
        if number == args.at and args.allocator == args.who:
            if args.what == "end":
                sys.exit("this one has had enough")
            if args.what == "no memory":
                raise Cuda.OutOfMemoryError("no memory for this one")
            if args.what == "differ":
                return Loss(-1)
        time.sleep((args.ours if args.allocator == "vpmm" else args.others) / 1e3)
        if args.log:
            with open(args.log, "a") as file:
                print(args.allocator, number, begin, time.monotonic(), *[drawn] * (args.draw > 1), file=file)
        return Loss(number)

    run(args, Torch, step, shapes, Sampler)
