"""Writes a trace with every size times a factor, rounded up: python3 scale.py TRACE.csv.gz FACTOR OUT.csv.gz"""

import csv
import gzip
import math
import sys

source, factor, target = sys.argv[1:]
with gzip.open(source, "rt", newline="") as rows, gzip.open(target, "wt", newline="") as file:
    trace, scaled = csv.DictReader(rows), None
    for row in trace:
        scaled = scaled or csv.DictWriter(file, trace.fieldnames, lineterminator="\n")
        if trace.line_num == 2:
            scaled.writeheader()
        scaled.writerow({**row, "Size": math.ceil(int(row["Size"]) * float(factor))})
