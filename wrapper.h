/* What cuda-sys binds: the CUDA 13.0 driver API and runtime API.
 *
 * __CUDA_API_VERSION_INTERNAL keeps every versioned symbol (_v2 and up) under
 * its own name; without it the headers rename the newest to the plain name and
 * hide the rest, which would raise the oldest driver that the bindings load on.
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cuda_runtime_api.h>
