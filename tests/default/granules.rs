//! Devices whose smallest piece of memory is not 2 MiB.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cuda_sim::{Schedule, Simulator};
use vpmm::{Buffers, Contents, Pool, PoolConfig};

use crate::rig::MIB;
use crate::support::changed::changed;
use crate::support::{Lcg, Rig};

/// What the device answers.
static GRANULE: AtomicUsize = AtomicUsize::new(0);
/// One test at a time has it.
static ALONE: Mutex<()> = Mutex::new(());

mod granularity {
    use crate::support::changed::replaced;

    replaced!(
        cuMemGetAllocationGranularity(
            granularity: *mut usize,
            properties: *const CUmemAllocationProp,
            option: CUmemAllocationGranularity_flags
        ),
        crate::support::changed::nothing(),
        // SAFETY: the caller's pointer, which the function itself has written to.
        unsafe { *granularity = super::GRANULE.load(super::Ordering::Relaxed) }
    );
}

fn on_a_device_with(granule: u64, test: impl Fn(&Rig)) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    GRANULE.store(granule as usize, Ordering::Relaxed);
    for schedule in [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random] {
        let sim = Simulator::builder().schedule(schedule).seed(granule).build().unwrap();
        let rig = Rig::with(changed(&sim, granularity::put), sim.clone());
        test(&rig);
        rig.assert_clean();
        drop(rig);
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

/// Of the driver's; the pool's are 2 MiB at least.
const GRANULES: [u64; 3] = [64 << 10, 4 * MIB, 16 * MIB];

#[test]
fn a_program_at_any_granularity() {
    for granule in GRANULES {
        let pools = granule.max(2 * MIB);
        on_a_device_with(granule, |rig| {
            let mut config = PoolConfig::default();
            config.moves_per_second = 0;
            config.limit_bytes = Some(20 * pools);
            config.va_size_bytes = Some(80 * pools);
            let watched = rig.pool(&config);
            let streams = [rig.stream(), rig.stream()];
            let (mut live, mut random) = (Vec::new(), Lcg(granule));
            for step in 0..100 {
                let stream = random.below(2) as usize;
                let mut bytes = 1 + random.below(pools);
                match random.below(6) {
                    0 => bytes = bytes * 7 + 1,
                    1 => bytes = 1 + random.below(64 << 10),
                    _ => {}
                }
                match random.below(5) {
                    0..3 => match watched.try_malloc(bytes, &streams[stream]) {
                        Ok(held) => live.push((held, stream)),
                        Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                    },
                    3 if !live.is_empty() => {
                        let at = random.below(live.len() as u64) as usize;
                        let (held, of) = live.swap_remove(at);
                        rig.order(&streams[of], &streams[stream]);
                        watched.free(held, &streams[stream]);
                    }
                    _ if step % 3 == 0 => {
                        watched.pool.trim_to(random.below(20) * pools).unwrap();
                    }
                    _ => {
                        let sim = rig.sim.as_ref().unwrap();
                        sim.advance_all();
                    }
                }
                watched.validate();
                let stats = watched.pool.stats();
                assert_eq!(stats.page_size_bytes, pools);
                assert!(stats.mapped_bytes <= 20 * pools);
            }
            for (held, of) in live {
                watched.free(held, &streams[of]);
            }
            watched.assert_intact();
        });
    }
}

#[test]
fn tags_and_graphs_at_a_small_limit() {
    for granule in GRANULES {
        on_a_device_with(granule, |rig| {
            let pools = granule.max(2 * MIB);
            let mut config = PoolConfig::default();
            config.limit_bytes = Some(2 * pools);
            let pool = Pool::new(&rig.device, &config).unwrap();
            let stream = rig.stream();
            let tagged = pool.tagged("a tag").unwrap();
            let ptr = tagged.malloc(pools as usize, &stream).unwrap();
            pool.suspend("a tag", &stream, &Contents::Keep(Buffers::Release)).unwrap();
            pool.resume("a tag", &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            let ptr = pool.malloc(pools as usize, &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
            graphs.end(&stream).unwrap();
            graphs.release(&stream).unwrap();
            drop((tagged, graphs));
            pool.validate().unwrap();
            pool.destroy().map_err(|(_, error)| error).unwrap();
        });
    }
}
