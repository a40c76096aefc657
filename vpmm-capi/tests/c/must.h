/* What has to be so, or the program says where it is not and ends. */
#ifndef MUST_H
#define MUST_H

#include <stdio.h>
#include <stdlib.h>

#include "vpmm.h"

#define MUST(condition)                                                                             \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, vpmm_last_error());       \
      exit(1);                                                                                      \
    }                                                                                               \
  } while (0)

#endif
