"""What measurements in pairs say: the median, the quartiles, and where the median surely lies."""

import math
import statistics

#: Of fewer values even the least and the largest say nothing with a probability of 0.95.
FEWEST = 6


def summary(values):
    """The median of at least one value, the quartiles, and an interval that holds the median of all such
    values with a probability of at least 0.95, whatever their distribution; that is all of them where they
    are too few to say."""
    ordered = sorted(values)
    count = len(ordered)
    quarters = statistics.quantiles(ordered, n=4, method="inclusive") if count > 1 else ordered * 3
    # From the value of this rank to that of the same rank from the end: the median is outside of them with
    # twice the probability of fewer heads than that in so many throws of a coin.
    rank, fewer = 0, 0.5**count
    while 2 * fewer <= 0.05:
        rank += 1
        fewer += math.comb(count, rank) * 0.5**count
    rank = max(rank, 1)
    return {
        "count": count,
        "median": quarters[1],
        "quartiles": [quarters[0], quarters[2]],
        "interval": [ordered[rank - 1], ordered[-rank]],
    }


def told(summed):
    """A summary as a text."""
    low, high = summed["quartiles"]
    first, last = summed["interval"]
    sure = "95 % sure" if summed["count"] >= FEWEST else "all"
    return (
        f"{summed['median']:.4f}, quartiles {low:.4f} to {high:.4f}, "
        f"{sure} {first:.4f} to {last:.4f}, of {summed['count']} rounds"
    )
