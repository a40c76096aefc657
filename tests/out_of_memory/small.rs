//! Requests that the paged profile serves from the driver's own pool, where memory is short.

use cuda_sim::{Schedule, Simulator};
use vpmm::{Error, PagedConfig, Pool, WaitPolicy};

use crate::rig::{GRANULE, LIMIT, MIB, Profile};
use crate::support::Rig;

/// As many requests as are served; all are freed.
fn served(pool: &Pool, rig: &Rig, bytes: u64) -> u64 {
    let stream = rig.stream();
    let mut held = Vec::new();
    let error = loop {
        match pool.malloc(bytes as usize, &stream) {
            Ok(ptr) if (held.len() as u64) < 4 * LIMIT => held.push(ptr),
            Ok(_) => panic!("no limit"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::OutOfMemory { limit_bytes: Some(_), .. }), "{error}");
    let count = held.len() as u64;
    held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    stream.synchronize().unwrap();
    pool.validate().unwrap();
    count
}

/// A limit that is set later is theirs, too; so is its end.
#[test]
fn a_limit_set_later_counts_small_requests() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = Profile::Paged.tight(&rig.device);
    assert_eq!(served(&pool, &rig, MIB), LIMIT * GRANULE / MIB);
    pool.limit_to(Some(4 * MIB)).unwrap();
    assert_eq!(served(&pool, &rig, MIB), 4);
    pool.limit_to(None).unwrap();
    assert_eq!(served(&pool, &rig, MIB), LIMIT * GRANULE / MIB);
    let open = Profile::Paged.open(&rig.device);
    open.limit_to(Some(4 * MIB)).unwrap();
    assert_eq!(served(&open, &rig, MIB), 4);
    open.limit_to(None).unwrap();
    let stream = rig.stream();
    let held: Vec<_> = (0..8).map(|_| open.malloc(MIB as usize, &stream).unwrap()).collect();
    held.into_iter().for_each(|ptr| open.free(ptr, &stream).unwrap());
    drop((pool, open));
    rig.assert_clean();
}

/// Pages that nobody uses make room, at the limit and where the device has no more.
#[test]
fn free_pages_make_room_for_small_requests() {
    for limit in [Some(64 * GRANULE), None] {
        let sim = Simulator::builder().memory_bytes(100 * GRANULE).build().unwrap();
        let rig = Rig::on(sim);
        let stream = rig.stream();
        let pool = Profile::Paged.limited(&rig.device, limit, WaitPolicy::FailAtOnce);
        let most = limit.unwrap_or(u64::MAX).min(rig.device.free_memory().unwrap());
        let all = pool.malloc((most / GRANULE * GRANULE) as usize, &stream).unwrap();
        assert!(pool.malloc(1000, &stream).unwrap_err().is_out_of_memory());
        pool.free(all, &stream).unwrap();
        stream.synchronize().unwrap();
        let small = pool.malloc(1000, &stream).unwrap();
        pool.validate().unwrap();
        // What was not needed stays.
        let pages = pool.malloc(32 * GRANULE as usize, &stream).unwrap();
        pool.free(pages, &stream).unwrap();
        pool.free(small, &stream).unwrap();
        drop(pool);
        rig.assert_clean();
    }
}

/// So does what the driver has for them in pieces that are too short for this one.
#[test]
fn free_pieces_make_room_for_longer_small_requests() {
    let sim = Simulator::builder().memory_bytes(24 * GRANULE).build().unwrap();
    let rig = Rig::on(sim);
    let stream = rig.stream();
    for policy in [WaitPolicy::FailAtOnce, WaitPolicy::WaitForPending] {
        let mut config = PagedConfig::default();
        config.page_size_bytes = Some(32 * GRANULE);
        config.va_size_bytes = 256 * GRANULE;
        config.out_of_memory = policy;
        let pool = Pool::paged(&rig.device, &config).unwrap();
        let short = pool.malloc(1000, &stream).unwrap();
        pool.free(short, &stream).unwrap();
        stream.synchronize().unwrap();
        let longer = 20 * GRANULE;
        assert!(rig.device.free_memory().unwrap() < longer, "the driver kept nothing");
        let longer = pool.malloc(longer as usize, &stream).unwrap();
        assert!(pool.malloc((8 * GRANULE) as usize, &stream).unwrap_err().is_out_of_memory());
        pool.validate().unwrap();
        pool.free(longer, &stream).unwrap();
        drop(pool);
        rig.assert_clean();
    }
}

/// Also those that work still uses, where a request may wait for it.
#[test]
fn small_requests_wait_for_pages() {
    for policy in [WaitPolicy::FailAtOnce, WaitPolicy::WaitForPending] {
        // What is enqueued runs when somebody waits for it.
        let rig = Rig::simulated(Schedule::Manual);
        let stream = rig.stream();
        let bytes = LIMIT * GRANULE;
        let pool = Profile::Paged.limited(&rig.device, Some(bytes), policy);
        let all = pool.malloc(bytes as usize, &stream).unwrap();
        rig.fill(all.address(), bytes, 1, stream.handle());
        pool.free(all, &stream).unwrap();
        let small = pool.malloc(1000, &stream);
        assert_eq!(small.is_ok(), policy == WaitPolicy::WaitForPending, "{small:?}");
        small.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        pool.validate().unwrap();
        drop(pool);
        rig.assert_clean();
    }
}
