//! How long a request waits for memory.

use std::time::{Duration, Instant};

use cuda_sim::Schedule;
use vpmm::{DevicePtr, PagedConfig, Pool, Reuse, Sharing, Stream, WaitPolicy};

use crate::rig::{GRANULE, LIMIT, Profile};
use crate::support::{Rig, call, streams};

/// Longer than any test should have to wait.
const LONG: Duration = Duration::from_secs(60);

fn open(rig: &Rig, profile: Profile, policy: WaitPolicy) -> Pool {
    profile.limited(&rig.device, Some(LIMIT * GRANULE), policy)
}

fn fill(pool: &Pool, stream: &Stream) -> Vec<DevicePtr> {
    (0..LIMIT).map(|_| pool.malloc(GRANULE as usize, stream).unwrap()).collect()
}

fn free_all(pool: &Pool, held: impl IntoIterator<Item = DevicePtr>, stream: &Stream) {
    held.into_iter().for_each(|ptr| pool.free(ptr, stream).unwrap());
    pool.validate().unwrap();
}

/// A request by another thread, which must wait for something that happens after a while. Answers what
/// came of the request.
fn request_while(
    pool: &Pool,
    granules: u64,
    stream: &Stream,
    meanwhile: impl FnOnce(),
) -> vpmm::Result<DevicePtr> {
    std::thread::scope(|scope| {
        let request = scope.spawn(|| pool.malloc((granules * GRANULE) as usize, stream));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!request.is_finished(), "it has waited for nothing");
        meanwhile();
        request.join().unwrap()
    })
}

/// What another thread frees serves a request that waits.
#[test]
fn a_free_by_another_thread_ends_the_wait() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let pool = open(rig, profile, WaitPolicy::WaitUpTo(LONG));
            let (stream, other) = (rig.stream(), rig.stream());
            let mut held = fill(&pool, &other);
            let freed = held.split_off(9);
            let ptr = request_while(&pool, 3, &stream, || {
                for ptr in freed {
                    pool.free(ptr, &other).unwrap();
                    std::thread::sleep(Duration::from_millis(3));
                }
            });
            held.push(ptr.unwrap());
            rig.order(&stream, &other);
            free_all(&pool, held, &other);
        }
    });
}

#[test]
fn a_wait_ends_when_its_time_is_over() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            for (policy, least) in [
                (WaitPolicy::FailAtOnce, 0),
                (WaitPolicy::WaitForPending, 0),
                (WaitPolicy::WaitUpTo(Duration::ZERO), 0),
                (WaitPolicy::WaitUpTo(Duration::from_millis(30)), 30),
            ] {
                let pool = open(rig, profile, policy);
                let stream = rig.stream();
                let held = fill(&pool, &stream);
                let start = Instant::now();
                let error = pool.malloc(GRANULE as usize, &stream).unwrap_err();
                let waited = start.elapsed();
                assert!(error.map().is_some(), "{error}");
                assert!(waited >= Duration::from_millis(least), "{policy:?}: {waited:?}");
                assert!(waited < LONG / 2, "{policy:?}: {waited:?}");
                free_all(&pool, held, &stream);
            }
        }
    });
}

/// There is no use in waiting for what the pool can never have.
#[test]
fn what_can_never_come_is_not_waited_for() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            for policy in [WaitPolicy::WaitForPending, WaitPolicy::WaitUpTo(LONG)] {
                let pool = open(rig, profile, policy);
                let stream = rig.stream();
                let held = fill(&pool, &stream);
                let start = Instant::now();
                let bytes = (LIMIT + 1) * GRANULE;
                assert!(pool.malloc(bytes as usize, &stream).is_err());
                assert!(start.elapsed() < LONG / 2, "{policy:?}: {:?}", start.elapsed());
                free_all(&pool, held, &stream);
            }
        }
    });
}

/// Nor, beside a stream that is at work with all that was freed, for more than the limit, or than the device has.
#[test]
fn what_can_never_come_is_not_waited_for_beside_a_busy_stream() {
    Rig::everywhere(|rig| {
        let device_bytes = rig.device.total_memory().unwrap();
        for profile in Profile::BOTH {
            for limit in [Some(LIMIT * GRANULE), None] {
                for policy in [WaitPolicy::WaitForPending, WaitPolicy::WaitUpTo(LONG)] {
                    let pool = profile.limited(&rig.device, limit, policy);
                    let (busy, stream) = (rig.stream(), rig.stream());
                    let held = fill(&pool, &busy);
                    let stall = rig.stall(busy.handle());
                    free_all(&pool, held, &busy);
                    let bytes = limit.unwrap_or(device_bytes) + GRANULE;
                    let waited = std::thread::scope(|scope| {
                        let request = scope.spawn(|| pool.malloc(bytes as usize, &stream));
                        let start = Instant::now();
                        while !request.is_finished() && start.elapsed() < LONG / 12 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        let waited = !request.is_finished();
                        drop(stall);
                        assert!(request.join().unwrap().unwrap_err().is_out_of_memory());
                        waited
                    });
                    assert!(!waited, "{profile:?} {limit:?} {policy:?}");
                }
            }
        }
    });
}

/// Everything is free, but on a stream that is busy, and the stream that asks cannot be made to wait
/// for it: it is capturing.
struct Blocked<'a> {
    rig: &'a Rig,
    pool: Pool,
    busy: Stream,
    capturing: Stream,
}

impl<'a> Blocked<'a> {
    fn new(rig: &'a Rig, policy: WaitPolicy) -> Self {
        let pool = open(rig, Profile::Default, policy);
        let (busy, capturing) = (rig.stream(), rig.stream());
        // The pool knows the stream before it captures.
        let ptr = pool.malloc(GRANULE as usize, &capturing).unwrap();
        pool.free(ptr, &capturing).unwrap();
        capturing.synchronize().unwrap();
        Self { rig, pool, busy, capturing }
    }

    fn begin(&self) {
        let held = fill(&self.pool, &self.busy);
        held.into_iter().for_each(|ptr| self.pool.free(ptr, &self.busy).unwrap());
        streams::begin_capture(self.rig, self.capturing.handle().raw());
    }

    fn end(self) {
        streams::end_capture(self.rig, self.capturing.handle().raw());
        self.pool.validate().unwrap();
    }
}

#[test]
fn nothing_waits_for_a_busy_stream_where_it_is_not_to() {
    Rig::everywhere(|rig| {
        for (policy, least) in
            [(WaitPolicy::FailAtOnce, 0), (WaitPolicy::WaitUpTo(Duration::from_millis(30)), 30)]
        {
            let blocked = Blocked::new(rig, policy);
            let stall = rig.stall(blocked.busy.handle());
            blocked.begin();
            let start = Instant::now();
            let error = blocked.pool.malloc(8 * GRANULE as usize, &blocked.capturing).unwrap_err();
            // The stall is not over: nobody has waited for the GPU.
            assert!(error.is_out_of_memory(), "{error}");
            assert!(start.elapsed() >= Duration::from_millis(least));
            assert_eq!(blocked.pool.stats().host_waits, 0);
            drop(stall);
            // What has finished by itself is found by requests that do not wait.
            let ptr = loop {
                match blocked.pool.malloc(8 * GRANULE as usize, &blocked.capturing) {
                    Ok(ptr) => break ptr,
                    Err(error) => assert!(start.elapsed() < LONG, "{error}"),
                }
            };
            assert_eq!(blocked.pool.stats().host_waits, 0);
            blocked.pool.free(ptr, &blocked.capturing).unwrap();
            blocked.end();
        }
    });
}

#[test]
fn a_wait_ends_with_the_work_that_it_is_for() {
    Rig::everywhere(|rig| {
        for policy in [WaitPolicy::WaitForPending, WaitPolicy::WaitUpTo(LONG)] {
            let blocked = Blocked::new(rig, policy);
            let stall = rig.stall(blocked.busy.handle());
            blocked.begin();
            let waits = || rig.driver.calls().count("cuEventSynchronize");
            let before = waits();
            let ptr = request_while(&blocked.pool, 8, &blocked.capturing, || {
                // However late the request's thread comes to its wait.
                let start = Instant::now();
                while policy == WaitPolicy::WaitForPending && waits() == before {
                    assert!(start.elapsed() < LONG, "it does not wait");
                    std::thread::yield_now();
                }
                drop(stall);
            });
            let ptr = ptr.unwrap();
            let on_the_host = blocked.pool.stats().host_waits > 0;
            assert_eq!(on_the_host, policy == WaitPolicy::WaitForPending);
            blocked.pool.free(ptr, &blocked.capturing).unwrap();
            blocked.end();
        }
    });
}

/// Several threads wait at the same time; each gets what was freed.
#[test]
fn several_requests_wait() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Eager);
        let pool = open(&rig, profile, WaitPolicy::WaitUpTo(LONG));
        let stream = rig.stream();
        let mut held = fill(&pool, &stream);
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let own = rig.stream();
                        let ptr = pool.malloc(2 * GRANULE as usize, &own).unwrap();
                        pool.free(ptr, &own).unwrap();
                    })
                })
                .collect();
            while waiting.iter().any(|thread| !thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(2));
                if let Some(ptr) = held.pop() {
                    pool.free(ptr, &stream).unwrap();
                }
            }
        });
        free_all(&pool, held, &stream);
        rig.assert_clean();
    }
}

/// A pool in which no stream may be made to wait for another, all of it freed on a stream that is busy.
/// Answers what comes of another stream's request.
fn request_of_what_is_pending(
    rig: &Rig,
    profile: Profile,
    policy: WaitPolicy,
    released_meanwhile: bool,
) -> vpmm::Result<()> {
    let mut reuse = Reuse::default();
    reuse.internal_dependencies = false;
    let pool = profile.with(&rig.device, Some(LIMIT * GRANULE), policy, reuse);
    let (busy, stream) = (rig.stream(), rig.stream());
    let held = fill(&pool, &busy);
    let stall = rig.stall(busy.handle());
    free_all(&pool, held, &busy);
    let result = if released_meanwhile {
        request_while(&pool, 8, &stream, || drop(stall))
    } else {
        let result = pool.malloc(8 * GRANULE as usize, &stream);
        drop(stall);
        result
    };
    result.map(|ptr| pool.free(ptr, &stream).unwrap())
}

#[test]
fn pending_memory_is_waited_for_on_the_host_where_streams_may_not() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            for policy in [WaitPolicy::WaitForPending, WaitPolicy::WaitUpTo(LONG)] {
                request_of_what_is_pending(rig, profile, policy, true).unwrap();
            }
            let short = Duration::from_millis(30);
            for (policy, least) in
                [(WaitPolicy::FailAtOnce, Duration::ZERO), (WaitPolicy::WaitUpTo(short), short)]
            {
                let start = Instant::now();
                let error = request_of_what_is_pending(rig, profile, policy, false).unwrap_err();
                let map = error.map().expect("a map");
                assert_eq!(map.stats.pending_bytes, LIMIT * GRANULE, "{profile:?}\n{map}");
                assert!(start.elapsed() >= least);
            }
        }
    });
}

/// Waits for other streams' memory are in the numbers, on the GPU where streams may be made to wait, else the host's.
#[test]
fn waits_are_counted() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            for internal_dependencies in [true, false] {
                let mut reuse = Reuse::default();
                (reuse.opportunistic, reuse.internal_dependencies) = (false, internal_dependencies);
                let policy = WaitPolicy::WaitForPending;
                let pool = profile.with(&rig.device, Some(LIMIT * GRANULE), policy, reuse);
                let (one, other) = (rig.stream(), rig.stream());
                let held = fill(&pool, &one);
                let stall = rig.stall(one.handle());
                free_all(&pool, held, &one);
                let ptr = if internal_dependencies {
                    let ptr = pool.malloc(8 * GRANULE as usize, &other);
                    drop(stall);
                    ptr
                } else {
                    request_while(&pool, 8, &other, || drop(stall))
                };
                let (ptr, stats) = (ptr.unwrap(), pool.stats());
                let counted = (stats.device_waits, stats.host_waits);
                let expected = if internal_dependencies { (1, 0) } else { (0, 1) };
                assert_eq!(counted, expected, "{profile:?}");
                free_all(&pool, [ptr], &other);
            }
        }
    });
}

/// What a stream frees while others wait for what it freed before is had by a wait on the GPU, too.
#[test]
fn what_is_freed_behind_a_pending_wait_is_waited_for_on_the_gpu() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            for foreign in [false, true] {
                let pool = open(rig, profile, WaitPolicy::FailAtOnce);
                let (own, other) = (rig.stream(), rig.stream());
                // Nobody tells of a foreign stream's end: an event is recorded at each free.
                let (raw, made) = streams::make(rig, 1);
                let one = if foreign { made } else { own.handle() };
                let mut held: Vec<_> =
                    (0..LIMIT).map(|_| pool.malloc(GRANULE as usize, one).unwrap()).collect();
                let stall = rig.stall(one);
                let free = |freed: Vec<DevicePtr>| {
                    freed.into_iter().for_each(|ptr| pool.free(ptr, one).unwrap());
                };
                let later = held.split_off(8);
                free(held);
                let mut held = vec![pool.malloc(2 * GRANULE as usize, &other).unwrap()];
                free(later);
                for granules in [8, LIMIT - 10] {
                    held.push(pool.malloc((granules * GRANULE) as usize, &other).unwrap());
                    pool.validate().unwrap();
                }
                let stats = pool.stats();
                assert!(stats.device_waits >= 2 && stats.host_waits == 0, "{profile:?}: {stats:?}");
                drop(stall);
                free_all(&pool, held, &other);
                drop(pool);
                call!(rig.driver, cuStreamDestroy_v2(raw));
            }
        }
    });
}

/// A trim that has seen what has finished, and may give it to nobody, takes nothing away from a request's wait.
#[test]
fn what_a_trim_has_seen_complete_is_waited_for_all_the_same() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let mut reuse = Reuse::default();
            (reuse.opportunistic, reuse.internal_dependencies) = (false, false);
            let policy = WaitPolicy::WaitForPending;
            let pool = profile.with(&rig.device, Some(LIMIT * GRANULE), policy, reuse);
            let (one, other) = (rig.stream(), rig.stream());
            free_all(&pool, fill(&pool, &one), &one);
            // The pool is not told.
            call!(rig.driver, cuStreamSynchronize(one.handle().raw()));
            assert_eq!(pool.trim_to((LIMIT - 2) * GRANULE).unwrap(), 2 * GRANULE);
            let ptr = pool.malloc(8 * GRANULE as usize, &other).unwrap();
            free_all(&pool, [ptr], &other);
        }
    });
}

/// Once something was exported no page moves any more, so no stream can be made to wait for another one's.
#[test]
fn pages_that_may_not_move_are_waited_for_on_the_host() {
    Rig::everywhere(|rig| {
        let mut config = PagedConfig::default();
        config.va_size_bytes = 128 * GRANULE;
        config.limit_bytes = Some(LIMIT * GRANULE);
        config.sharing = Sharing::FileDescriptor;
        let pool = Pool::paged(&rig.device, &config).unwrap();
        let (busy, stream) = (rig.stream(), rig.stream());
        let held = fill(&pool, &busy);
        drop(pool.export(held[0]).unwrap());
        let stall = rig.stall(busy.handle());
        free_all(&pool, held, &busy);
        let ptr = request_while(&pool, 8, &stream, || drop(stall)).unwrap();
        free_all(&pool, [ptr], &stream);
    });
}
