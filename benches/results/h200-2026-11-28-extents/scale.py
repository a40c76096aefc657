"""Writes traces with every request scaled: scale.py FOLDER TRACE..., to FOLDER/NAME@FACTOR.csv.gz."""

import csv
import gzip
import os
import sys

FACTORS = [0.62, 0.77, 0.9, 1.13, 1.31, 1.46]


def scale(folder: str, path: str, factor: float) -> None:
    with gzip.open(path, "rt") as log:
        rows = list(csv.reader(log))
    head = [name.strip() for name in rows[0]]
    size = head.index("Size")
    name = os.path.basename(path).removesuffix(".csv.gz")
    with gzip.open(f"{folder}/{name}@{factor}.csv.gz", "wt", compresslevel=1) as out:
        writer = csv.writer(out)
        writer.writerow(head)
        for row in rows[1:]:
            if len(row) > size and row[size].strip().isdigit():
                row[size] = str(max(1, int(int(row[size]) * factor)))
            writer.writerow(row)


for path in sys.argv[2:]:
    for factor in FACTORS:
        scale(sys.argv[1], path, factor)
