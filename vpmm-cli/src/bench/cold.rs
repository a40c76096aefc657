//! Cases that need a fresh pool each time: growth, and bringing memory together.

use std::time::{Duration, Instant};

use vpmm::StreamHandle;

use super::figures::{Figures, Percentiles, median};
use super::loops::{Hands, Samples, clock_ns};
use super::script::Cold;
use super::subject::Subject;
use super::{Bench, BenchError};

/// What another pool is asked for before the clock runs. It is mapped.
const WAKING_BYTES: u64 = 2 << 20;

/// No further pool is made after this long, once there were [`LEAST_POOLS`].
const PATIENCE: Duration = Duration::from_secs(2);
const LEAST_POOLS: usize = 3;

/// One pool's figures.
struct Measured {
    ns_per_op: f64,
    driver_calls: u64,
    peak_mapped_bytes: u64,
}

/// Measures the script on up to `pools` pools, and where it has several calls, on as many again
/// with a clock at every call.
pub(super) fn run<S: Subject>(
    script: &Cold,
    pools: usize,
    bench: &Bench<'_>,
    open: impl Fn(Option<u64>) -> vpmm::Result<S>,
    streams: &[StreamHandle],
) -> Result<Figures, BenchError> {
    let ops = script.timed.len() as u64;
    let fresh = || open(script.limit_bytes);
    let stream = *streams.first().ok_or(BenchError::Nothing)?;
    let wake = || {
        let other = fresh()?;
        let ptr = other.allocate(WAKING_BYTES, stream)?;
        // SAFETY: from this allocator, and freed once.
        unsafe { other.free(ptr, stream) }
    };
    bench.enter()?;
    let mut measured = Vec::new();
    several(pools, || {
        let subject = fresh()?;
        let one = on_fresh(script, bench, &subject, streams, wake, |hands| {
            let started = Instant::now();
            hands.run_steps(&script.timed)?;
            Ok(started.elapsed())
        })?;
        let (spent, driver_calls) = one;
        measured.push(Measured {
            ns_per_op: spent.as_nanos() as f64 / ops.max(1) as f64,
            driver_calls,
            peak_mapped_bytes: subject.peak_mapped_bytes()?,
        });
        Ok(())
    })?;
    let ns_per_op = median(measured.iter().map(|one| one.ns_per_op).collect());
    // Of the pool whose figure is told.
    let told = measured.iter().find(|one| one.ns_per_op == ns_per_op).ok_or(BenchError::Nothing)?;

    let percentiles = if ops == 1 {
        Percentiles::of(measured.iter().map(|one| one.ns_per_op).collect(), 0.0)
    } else {
        let mut all: Vec<f64> = Vec::new();
        several(pools, || {
            let subject = fresh()?;
            let mut samples = Samples::with_room_for(script.timed.len());
            on_fresh(script, bench, &subject, streams, wake, |hands| {
                hands.sample_steps(&script.timed, &mut samples)
            })?;
            all.extend(samples.into_nanoseconds().into_iter().map(f64::from));
            Ok(())
        })?;
        Percentiles::of(all, clock_ns())
    };
    Ok(Figures {
        threads: 1,
        ops,
        ns_per_op,
        p50_ns: percentiles.p50_ns,
        p99_ns: percentiles.p99_ns,
        p999_ns: percentiles.p999_ns,
        max_ns: percentiles.max_ns,
        mops_per_s: 1e3 / ns_per_op.max(f64::MIN_POSITIVE),
        peak_live_bytes: script.peak_live_bytes(),
        peak_mapped_bytes: told.peak_mapped_bytes,
        driver_calls: told.driver_calls,
    })
}

/// Does something up to `times` times, less often where it takes long.
fn several(times: usize, mut once: impl FnMut() -> vpmm::Result<()>) -> vpmm::Result<()> {
    let started = Instant::now();
    for done in 0..times {
        if done >= LEAST_POOLS && started.elapsed() > PATIENCE {
            break;
        }
        once()?;
    }
    Ok(())
}

/// Prepares a fresh pool, waits for the device, has the driver be done with the pool before, and measures; with
/// the driver calls of `timed`. What is fresh is the pool: as in all other cases its code and the driver's have just
/// run, which is what `wake` is for. After some milliseconds of waiting both would take half as long again.
fn on_fresh<S: Subject, T>(
    script: &Cold,
    bench: &Bench<'_>,
    subject: &S,
    streams: &[StreamHandle],
    wake: impl Fn() -> vpmm::Result<()>,
    timed: impl FnOnce(&mut Hands<'_, S>) -> vpmm::Result<T>,
) -> vpmm::Result<(T, u64)> {
    let mut hands = Hands::new(subject, streams, script.slots);
    let measured =
        hands.run_steps(&script.setup).and_then(|()| bench.synchronize()).and_then(|()| {
            bench.settle();
            wake()?;
            let before = subject.driver_calls();
            let result = timed(&mut hands)?;
            Ok((result, subject.driver_calls() - before))
        });
    let freed = hands.let_go();
    let measured = measured?;
    freed.and_then(|()| subject.check_logs()).map(|()| measured)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn several_are_as_many_as_asked_for_where_they_take_no_longer_than_there_is_time() {
        let done = |times, each| {
            let mut done = 0;
            let all = several(times, || {
                done += 1;
                thread::sleep(each);
                Ok(())
            });
            all.map(|()| done).unwrap()
        };
        assert_eq!((done(9, Duration::ZERO), done(1, Duration::ZERO)), (9, 1));
        assert_eq!(done(9, PATIENCE / 3 + Duration::from_millis(50)), LEAST_POOLS);
    }
}
