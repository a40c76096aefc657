//! What driver calls cost: modelled host microseconds beside the simulator's own speed.
//!
//! A simulated call takes as long as the simulator takes, which says nothing about a GPU. So
//! every call also adds a modelled time, taken from measurements of one machine. Virtual
//! memory calls follow the number of physical handles they touch and, more weakly, the size
//! of each; the others are flat. The model is of one thread on an idle driver: it knows
//! neither contention on the driver's lock nor the slow creates seen on a busy device. A call
//! that was not measured costs nothing.

#![forbid(unsafe_code)]

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// The modelled cost of driver calls on one machine. All answers are in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs(&'static Machine);

/// The measured figures of one machine.
#[derive(Debug)]
struct Machine {
    create: Curve,
    map: Curve,
    set_access: Curve,
    set_access_again: f64,
    unmap: Curve,
    release: Curve,
    import: Curve,
    reserve: Curve,
    /// cudaMalloc and cudaFree together: only the pair was measured.
    malloc_and_free: Curve,
    event_record: f64,
    event_record_timed: f64,
    event_query_done: f64,
    event_query_pending: f64,
    stream_wait_done: f64,
    stream_wait_pending: f64,
    write_value: f64,
    write_value_no_barrier: f64,
    flat: &'static [(&'static str, f64)],
}

/// A cost by size, as measured points `(bytes, microseconds)` in ascending order of bytes.
#[derive(Debug)]
struct Curve(&'static [(u64, f64)]);

impl Curve {
    /// The line through the two points around `bytes`; beyond the last point its line goes on,
    /// and below the first the cost stays.
    fn at(&self, bytes: u64) -> f64 {
        let points = self.0;
        let above = points.partition_point(|&(size, _)| size < bytes);
        match (above, points) {
            (_, []) => 0.0,
            (0, [first, ..]) => first.1,
            (_, [only]) => only.1,
            _ => {
                let upper = above.min(points.len() - 1);
                let ((x0, y0), (x1, y1)) = (points[upper - 1], points[upper]);
                y0 + (y1 - y0) * (bytes - x0) as f64 / (x1 - x0) as f64
            }
        }
    }
}

/// One point of the table "1 GiB built from handles of one size": the size of a handle, and
/// the cost of one of the GiB's handles, of which there are `GIB / bytes`.
const fn of_gib(handle_mib: u64, total_us: f64) -> (u64, f64) {
    (handle_mib * MIB, total_us * handle_mib as f64 / 1024.0)
}

/// One NVIDIA H200, driver 580.159, CUDA 13.0. Medians of one run each.
static H200: Machine = Machine {
    // Table "1 GiB built from handles of one size", column create.
    create: Curve(&[
        of_gib(2, 3778.0),
        of_gib(4, 1740.0),
        of_gib(8, 1131.0),
        of_gib(16, 467.0),
        of_gib(32, 231.0),
        of_gib(64, 128.0),
        of_gib(128, 73.0),
        of_gib(256, 73.0),
        of_gib(512, 46.0),
        of_gib(1024, 34.0),
    ]),
    // Column map; alone, "cuMemMap, any size" took 0.6.
    map: Curve(&[
        of_gib(2, 233.0),
        of_gib(4, 104.0),
        of_gib(8, 57.0),
        of_gib(16, 26.0),
        of_gib(32, 14.0),
        of_gib(64, 8.0),
        of_gib(128, 4.0),
        of_gib(256, 5.0),
        of_gib(512, 2.0),
        of_gib(1024, 1.0),
    ]),
    // Column set access: one call over the whole range.
    set_access: Curve(&[
        of_gib(2, 11003.0),
        of_gib(4, 4901.0),
        of_gib(8, 2481.0),
        of_gib(16, 1219.0),
        of_gib(32, 621.0),
        of_gib(64, 318.0),
        of_gib(128, 181.0),
        of_gib(256, 157.0),
        of_gib(512, 77.0),
        of_gib(1024, 48.0),
    ]),
    // Row "cuMemSetAccess again on a range that has the access already".
    set_access_again: 0.17,
    // Column unmap the old.
    unmap: Curve(&[
        of_gib(2, 7328.0),
        of_gib(4, 3359.0),
        of_gib(8, 1670.0),
        of_gib(16, 818.0),
        of_gib(32, 412.0),
        of_gib(64, 225.0),
        of_gib(128, 124.0),
        of_gib(256, 73.0),
        of_gib(512, 37.0),
        of_gib(1024, 23.0),
    ]),
    // Column release.
    release: Curve(&[
        of_gib(2, 4429.0),
        of_gib(4, 2259.0),
        of_gib(8, 1282.0),
        of_gib(16, 860.0),
        of_gib(32, 608.0),
        of_gib(64, 402.0),
        of_gib(128, 534.0),
        of_gib(256, 307.0),
        of_gib(512, 249.0),
        of_gib(1024, 230.0),
    ]),
    // Table of sharing between processes, row "import in another process".
    import: Curve(&[(2 * MIB, 17.0), (64 * MIB, 16.0), (GIB, 22.0)]),
    // Row "cuMemAddressReserve 1 to 64 TiB": 2 to 12.
    reserve: Curve(&[(TIB, 2.0), (64 * TIB, 12.0)]),
    // Row "cudaMalloc + cudaFree, 4 MiB / 64 MiB / 1 GiB".
    malloc_and_free: Curve(&[(4 * MIB, 63.0), (64 * MIB, 96.0), (GIB, 446.0)]),
    // Rows "cuEventRecord, timing disabled" and "enabled".
    event_record: 0.16,
    event_record_timed: 1.29,
    // Row "cuEventQuery, done / pending".
    event_query_done: 0.16,
    event_query_pending: 0.13,
    // Row "cuStreamWaitEvent, done / pending".
    stream_wait_done: 0.13,
    stream_wait_pending: 0.17,
    // Row "cuStreamWriteValue64 to host memory, with / without barrier".
    write_value: 1.81,
    write_value_no_barrier: 1.13,
    // In ascending order of name.
    flat: &[
        // Row "cuStreamGetId, cuStreamIsCapturing, cuCtxGetCurrent" (three of these).
        ("cuCtxGetCurrent", 0.010),
        // "a primary context 130 ms".
        ("cuDevicePrimaryCtxRetain", 130_000.0),
        // Row "cuEventCreate / Destroy".
        ("cuEventCreate", 0.14),
        ("cuEventDestroy", 0.10),
        // "cuInit takes 233 ms".
        ("cuInit", 233_000.0),
        // Row "empty kernel launch".
        ("cuLaunchKernel", 2.6),
        // Row "cudaMallocAsync + cudaFreeAsync, warm, any size, 1 thread": 0.47 to 0.65 for the
        // pair, its middle shared evenly, because only the pair was measured.
        ("cuMemAllocAsync", 0.28),
        ("cuMemAllocFromPoolAsync", 0.28),
        // Table of sharing, row "export a descriptor, first or again".
        ("cuMemExportToShareableHandle", 17.0),
        // With cuMemAllocAsync above.
        ("cuMemFreeAsync", 0.28),
        // With cuCtxGetCurrent above.
        ("cuStreamGetId", 0.017),
        ("cuStreamIsCapturing", 0.017),
    ],
};

static FREE: Machine = Machine {
    create: Curve(&[]),
    map: Curve(&[]),
    set_access: Curve(&[]),
    set_access_again: 0.0,
    unmap: Curve(&[]),
    release: Curve(&[]),
    import: Curve(&[]),
    reserve: Curve(&[]),
    malloc_and_free: Curve(&[]),
    event_record: 0.0,
    event_record_timed: 0.0,
    event_query_done: 0.0,
    event_query_pending: 0.0,
    stream_wait_done: 0.0,
    stream_wait_pending: 0.0,
    write_value: 0.0,
    write_value_no_barrier: 0.0,
    flat: &[],
};

impl Default for Costs {
    fn default() -> Self {
        Self::h200()
    }
}

impl Costs {
    /// As measured on one NVIDIA H200 (driver 580.159, CUDA 13.0, 16 x86-64 cores).
    pub const fn h200() -> Self {
        Self(&H200)
    }

    /// Every call costs nothing.
    pub const fn free() -> Self {
        Self(&FREE)
    }

    /// cuMemCreate of one handle.
    pub fn create(&self, handle_bytes: u64) -> f64 {
        self.0.create.at(handle_bytes)
    }

    /// cuMemMap of one handle.
    pub fn map(&self, handle_bytes: u64) -> f64 {
        self.0.map.at(handle_bytes)
    }

    /// One cuMemSetAccess over mappings of these sizes that do not have the access yet, one that it opens to
    /// several devices as often as those are (`benches/results/h200-2026-11-30-peers`, of two; the first that is
    /// open to both takes a millisecond more, which is not in the model). If all
    /// have it, the call costs [`set_access_again`](Self::set_access_again).
    pub fn set_access(&self, mapping_bytes: impl IntoIterator<Item = u64>) -> f64 {
        mapping_bytes.into_iter().map(|bytes| self.0.set_access.at(bytes)).sum()
    }

    /// A cuMemSetAccess that changes nothing.
    pub fn set_access_again(&self) -> f64 {
        self.0.set_access_again
    }

    /// One cuMemUnmap over mappings of these sizes, each as often as there are devices that it is open to.
    pub fn unmap(&self, mapping_bytes: impl IntoIterator<Item = u64>) -> f64 {
        mapping_bytes.into_iter().map(|bytes| self.0.unmap.at(bytes)).sum()
    }

    /// cuMemRelease of the last reference to an unmapped handle.
    pub fn release(&self, handle_bytes: u64) -> f64 {
        self.0.release.at(handle_bytes)
    }

    /// cuMemImportFromShareableHandle of a handle of this size.
    pub fn import(&self, handle_bytes: u64) -> f64 {
        self.0.import.at(handle_bytes)
    }

    /// cuMemAddressReserve.
    pub fn reserve(&self, bytes: u64) -> f64 {
        self.0.reserve.at(bytes)
    }

    /// cuMemAlloc: half of the pair with cuMemFree, because only the pair was measured.
    pub fn malloc(&self, bytes: u64) -> f64 {
        self.0.malloc_and_free.at(bytes) / 2.0
    }

    /// cuMemFree on an idle device: half of the pair with cuMemAlloc.
    pub fn free_memory(&self, bytes: u64) -> f64 {
        self.0.malloc_and_free.at(bytes) / 2.0
    }

    /// cuEventRecord of an event made with or without timing.
    pub fn event_record(&self, timing: bool) -> f64 {
        if timing { self.0.event_record_timed } else { self.0.event_record }
    }

    /// cuEventQuery of an event that has completed or not.
    pub fn event_query(&self, done: bool) -> f64 {
        if done { self.0.event_query_done } else { self.0.event_query_pending }
    }

    /// cuStreamWaitEvent on an event that has completed or not.
    pub fn stream_wait(&self, done: bool) -> f64 {
        if done { self.0.stream_wait_done } else { self.0.stream_wait_pending }
    }

    /// cuStreamWriteValue64 with or without the barrier before the write.
    pub fn write_value(&self, barrier: bool) -> f64 {
        if barrier { self.0.write_value } else { self.0.write_value_no_barrier }
    }

    /// A call that costs the same whatever its arguments, by its name with or without a version
    /// suffix (`cuEventDestroy_v2`) or the suffix of the per-thread variants. 0 for a name that
    /// was not measured.
    pub fn flat(&self, name: &str) -> f64 {
        let base = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        let base = match base.rsplit_once("_v") {
            Some((base, version)) if version.bytes().all(|b| b.is_ascii_digit()) => base,
            _ => base,
        };
        match self.0.flat.binary_search_by_key(&base, |entry| entry.0) {
            Ok(at) => self.0.flat[at].1,
            Err(_) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handle size in MiB, then µs to build, open, close and give back 1 GiB of such handles:
    /// create, map, set access, unmap, release.
    const ONE_GIB: [(u64, [f64; 5]); 10] = [
        (2, [3778.0, 233.0, 11003.0, 7328.0, 4429.0]),
        (4, [1740.0, 104.0, 4901.0, 3359.0, 2259.0]),
        (8, [1131.0, 57.0, 2481.0, 1670.0, 1282.0]),
        (16, [467.0, 26.0, 1219.0, 818.0, 860.0]),
        (32, [231.0, 14.0, 621.0, 412.0, 608.0]),
        (64, [128.0, 8.0, 318.0, 225.0, 402.0]),
        (128, [73.0, 4.0, 181.0, 124.0, 534.0]),
        (256, [73.0, 5.0, 157.0, 73.0, 307.0]),
        (512, [46.0, 2.0, 77.0, 37.0, 249.0]),
        (1024, [34.0, 1.0, 48.0, 23.0, 230.0]),
    ];

    fn near(model: f64, measured: f64, tolerance: f64) -> bool {
        (model - measured).abs() <= tolerance * measured
    }

    #[test]
    fn a_gib_costs_what_was_measured() {
        let costs = Costs::h200();
        for (mib, measured) in ONE_GIB {
            let bytes = mib * MIB;
            let handles = (GIB / bytes) as usize;
            let all = || std::iter::repeat_n(bytes, handles);
            let model = [
                all().map(|b| costs.create(b)).sum(),
                all().map(|b| costs.map(b)).sum(),
                costs.set_access(all()),
                costs.unmap(all()),
                all().map(|b| costs.release(b)).sum(),
            ];
            for (model, measured) in model.into_iter().zip(measured) {
                assert!(near(model, measured, 0.001), "{mib} MiB: {model} for {measured}");
            }
        }
    }

    /// Figures of single calls that the table did not go into.
    #[test]
    fn agrees_with_the_single_calls() {
        let costs = Costs::h200();
        assert!(near(costs.create(2 * MIB), 7.9, 0.1));
        assert!(near(costs.set_access([2 * MIB]), 20.0, 0.1));
        assert!(near(costs.set_access([64 * MIB]), 20.0, 0.1));
        assert!(near(costs.set_access([GIB]), 55.0, 0.15));
        assert!(near(costs.unmap([2 * MIB]), 14.0, 0.1));
        assert!(near(costs.release(64 * MIB), 26.0, 0.1));
        // 40,000 handles of 2 MiB: 33 to 40 µs a page to make and open, 623 ms to unmap.
        let page = costs.create(2 * MIB) + costs.map(2 * MIB) + costs.set_access([2 * MIB]);
        assert!((26.0..40.0).contains(&page), "{page}");
        let unmap = costs.unmap(std::iter::repeat_n(2 * MIB, 40_000));
        assert!(near(unmap, 623_000.0, 0.1), "{unmap}");
        assert_eq!(costs.malloc(GIB) + costs.free_memory(GIB), 446.0);
        assert_eq!(costs.reserve(64 * TIB), 12.0);
    }

    #[test]
    fn sizes_between_and_beyond_the_points() {
        let costs = Costs::h200();
        let (low, mid, high) =
            (costs.release(64 * MIB), costs.release(96 * MIB), costs.release(128 * MIB));
        assert!(near(mid, (low + high) / 2.0, 1e-9));
        assert!(costs.release(4 * GIB) > costs.release(GIB));
        assert_eq!(costs.create(0), costs.create(2 * MIB));
        assert_eq!(costs.reserve(2 * MIB), 2.0);
        assert!(costs.create(u64::MAX).is_finite());
    }

    #[test]
    fn flat_calls_by_name() {
        let costs = Costs::h200();
        assert_eq!(costs.flat("cuEventDestroy_v2"), 0.10);
        assert_eq!(costs.flat("cuLaunchKernel_ptsz"), 2.6);
        assert_eq!(costs.flat("cuStreamGetId"), 0.017);
        assert_eq!(costs.flat("cuNoSuchCall"), 0.0);
        assert!(H200.flat.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn free_is_free() {
        let costs = Costs::free();
        let sum = costs.create(GIB)
            + costs.map(GIB)
            + costs.set_access([GIB])
            + costs.set_access_again()
            + costs.unmap([GIB])
            + costs.release(GIB)
            + costs.import(GIB)
            + costs.reserve(GIB)
            + costs.malloc(GIB)
            + costs.free_memory(GIB)
            + costs.event_record(true)
            + costs.event_query(true)
            + costs.stream_wait(false)
            + costs.write_value(true)
            + costs.flat("cuInit");
        assert_eq!(sum, 0.0);
    }
}
