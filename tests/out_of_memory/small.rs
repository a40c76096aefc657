//! Requests that the paged profile serves from the driver's own pool, where memory is short.

use cuda_sim::Schedule;
use vpmm::{Error, Pool};

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
