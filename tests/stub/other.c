/* A library of another kind: no CUDA symbol in it. */
int vpmm_not_cuda(void) { return 1; }
