/* A runtime that only tells its version: VERSION, or the error FAILURE. With
 * neither defined it has no such call, as a library that is no runtime at all. */

#if defined(VERSION)
unsigned cudaRuntimeGetVersion(int *version)
{
    *version = VERSION;
    return 0;
}
#elif defined(FAILURE)
unsigned cudaRuntimeGetVersion(int *version)
{
    (void)version;
    return FAILURE;
}
#endif

/* Present everywhere, so that a library without a version still is a runtime. */
unsigned cudaGetDeviceCount(int *count)
{
    *count = 0;
    return 100;
}
