//! Short extents given up for long ones, by a program at leisure whose requests never settle.

use std::thread::sleep;
use std::time::Duration;

use cuda_sim::Schedule;
use cuda_sys::types::CUresult;
use vpmm::{DevicePtr, Pool, PoolConfig, Stream};

use crate::rig::{GIB, GRANULE};
use crate::support::Rig;

/// Blocks that are live, of 30 to 64 granules each.
const BLOCKS: usize = 40;
/// Bytes at the beginning of each granule that have contents.
const WRITTEN: u64 = 512;

struct Unsettled<'a> {
    rig: &'a Rig,
    pool: &'a Pool,
    stream: &'a Stream,
    /// With their sizes.
    blocks: Vec<(DevicePtr, u64)>,
    random: u64,
}

impl<'a> Unsettled<'a> {
    /// Grows while time is saved up: by extents of a granule each.
    fn new(rig: &'a Rig, pool: &'a Pool, stream: &'a Stream) -> Self {
        sleep(Duration::from_millis(120));
        let first = pool.malloc(1000, stream).unwrap();
        pool.free(first, stream).unwrap();
        let mut program = Self { rig, pool, stream, blocks: Vec::new(), random: 7 };
        (0..BLOCKS).for_each(|_| program.malloc().unwrap());
        program
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as usize % bound
    }

    fn malloc(&mut self) -> vpmm::Result<()> {
        let bytes = (30 + self.below(35) as u64) * GRANULE;
        let ptr = self.pool.malloc(bytes as usize, self.stream)?;
        for address in Self::written(ptr, bytes) {
            self.rig.fill(address, WRITTEN, address, self.stream.handle());
        }
        self.blocks.push((ptr, bytes));
        Ok(())
    }

    /// Some of each granule.
    fn written(ptr: DevicePtr, bytes: u64) -> impl Iterator<Item = u64> {
        (ptr.address()..ptr.address() + bytes).step_by(GRANULE as usize)
    }

    fn free(&self, (ptr, bytes): (DevicePtr, u64)) {
        for address in Self::written(ptr, bytes) {
            self.rig.check(address, WRITTEN, address, self.stream.handle());
        }
        self.pool.free(ptr, self.stream).unwrap();
    }

    fn end(self) {
        self.blocks.iter().for_each(|block| self.free(*block));
    }

    /// Another size instead of any of those that are live.
    fn step(&mut self) -> vpmm::Result<()> {
        let at = self.below(self.blocks.len());
        let block = self.blocks.swap_remove(at);
        self.free(block);
        self.malloc()
    }
}

fn config() -> PoolConfig {
    let mut config = PoolConfig::default();
    config.va_size_bytes = Some(32 * GIB);
    config
}

/// What moves by dozens of short extents again and again is served from long ones before long, in no more
/// memory. Without that later rounds move half as much as the first ones.
#[test]
fn what_moves_again_and_again_becomes_long() {
    const FIRST: usize = 6;
    // Twelve as a rule. On a machine that is busy with something else more time passes in each, which makes up
    // for more moves.
    const MOST: usize = 48;
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config());
    let stream = rig.stream();
    let mut program = Unsettled::new(&rig, &watched.pool, &stream);
    let mut rounds: Vec<u64> = Vec::new();
    let has_settled = |rounds: &[u64]| {
        let [first, last] = [&rounds[..FIRST], &rounds[rounds.len() - FIRST..]];
        let [first, last] = [first, last].map(|some| some.iter().sum::<u64>());
        last < first / 4
    };
    while rounds.len() < 2 * FIRST || !has_settled(&rounds) {
        assert!(rounds.len() < MOST, "{rounds:?}");
        let moved = watched.pool.stats().extents_moved;
        (0..BLOCKS).for_each(|_| program.step().unwrap());
        rounds.push(watched.pool.stats().extents_moved - moved);
    }
    watched.validate();
    let stats = watched.pool.stats();
    assert!(stats.mapped_bytes < stats.peak_live_bytes / 10 * 11, "{stats:?}");
    let granules = stats.pages_created * GRANULE;
    assert!(granules > stats.peak_mapped_bytes, "nothing went back");
    program.end();
    watched.assert_intact();
}

/// What goes back is not what the request was to be served from in place: that would be lacking then, and be made
/// beside what moves no more. Programs like this one came to hold 1.045 of their peak so.
#[test]
fn what_a_request_has_in_place_does_not_go_back_for_it() {
    let held = [77, 231, 539].map(|seed| {
        let rig = Rig::simulated(Schedule::Eager);
        let watched = rig.pool(&config());
        let stream = rig.stream();
        let mut program = Unsettled::new(&rig, &watched.pool, &stream);
        program.random = seed;
        (0..20 * BLOCKS).for_each(|_| program.step().unwrap());
        let stats = watched.pool.stats();
        program.end();
        watched.assert_intact();
        stats.peak_mapped_bytes as f64 / stats.peak_live_bytes as f64
    });
    assert!(held.iter().sum::<f64>() / 3.0 < 1.02, "{held:?}");
}

/// Whichever driver call fails meanwhile: the request fails or not, the pool is whole, and goes on.
#[test]
fn a_failure_of_an_exchange_leaves_the_pool_whole() {
    for code in [CUresult::CUDA_ERROR_UNKNOWN, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
        let rig = Rig::simulated(Schedule::Eager);
        let watched = rig.pool(&config());
        let stream = rig.stream();
        let mut program = Unsettled::new(&rig, &watched.pool, &stream);
        let sim = rig.sim.as_ref().expect("a simulator");
        // Until something has gone back.
        let gone = || {
            let stats = watched.pool.stats();
            stats.pages_created * GRANULE > stats.peak_mapped_bytes
        };
        let mut steps = 0;
        while !gone() {
            program.step().unwrap();
            steps += 1;
            // A few rounds; on a slow machine more time passes in each, which makes up for more moves.
            assert!(steps < 48 * BLOCKS, "nothing went back");
        }
        for step in 0..240_u64 {
            let (name, n) = [
                ("cuMemUnmap", 1 + step * 7 % 80),
                ("cuMemRelease", 1 + step % 9),
                ("cuMemCreate", 1),
                ("cuEventQuery", 1),
            ][step as usize % 4];
            sim.fail_nth(name, n, code);
            if program.step().is_err() {
                assert_ne!(name, "cuEventQuery", "nothing but what a stream freed goes by that");
                // What was to come instead comes now.
                sim.clear_faults();
                program.malloc().unwrap();
            }
            sim.clear_faults();
            if step % 16 == 0 {
                watched.validate();
            }
        }
        watched.validate();
        program.end();
        watched.assert_intact();
    }
}

/// Whatever the GPU does when: what goes back is nobody's by then.
#[test]
fn contents_stay_beside_what_goes_back() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config());
        let stream = rig.stream();
        let mut program = Unsettled::new(rig, &watched.pool, &stream);
        for step in 0..10 * BLOCKS {
            program.step().unwrap();
            if step % 4 == 0 {
                // The program waits for its results now and then.
                stream.synchronize().unwrap();
            }
        }
        watched.validate();
        program.end();
        watched.assert_intact();
    });
}
