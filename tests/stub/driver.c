/* A driver with a handful of symbols: enough to see which are present, which are
 * missing, and that calls go through with their arguments. Written without any
 * CUDA header. */

/* No CUresult has this value, so that an answer is known to come from here. */
enum { MARK = 9000 };

unsigned cuInit(unsigned flags) { return MARK + flags; }

unsigned cuDriverGetVersion(int *version)
{
    *version = 12080;
    return 0;
}

unsigned cuDeviceGetCount(int *count)
{
    *count = 3;
    return 0;
}

/* Four arguments in and one out, which tells whether all arrived in order. */
unsigned cuMemAddressReserve(unsigned long long *address, unsigned long size,
                             unsigned long alignment, unsigned long long fixed,
                             unsigned long long flags)
{
    *address = size + alignment * 2 + fixed * 3 + flags * 4;
    return 0;
}
